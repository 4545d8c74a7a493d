"""Table 8 of Unified Normalization: memory and throughput at inference, LN against UN folded.

    python benchmarks/un_table8.py [--scale pocket] [--rounds 60] [--out papers/results/un.table8.csv]

Swin-T classifies images of 224 x 224. Mask R-CNN finds objects in them, at scale pocket with the small Swin of our
other tables. Weights are random. Models run eagerly in float32, LN and UN by turns. Memory is what a call allocates at
its peak.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rows import commit, processor, quiet

IMAGE = 224
MODELS = {  # by column: recipe, settings by scale, images in a call
    "ImageNet": ("imagenet_swin_t", {"pocket": {}, "paper": {}}, 8),
    "COCO": ("mask_rcnn_coco_36", {"pocket": {"model.arch": "mask_rcnn_pocket"}, "paper": {}}, 1),
}
NORMS = {"LN": "layer", "UN": "un(window=4, outlier_filtration=True)"}


def models(column: str, scale: str) -> dict[str, Any]:
    """The model of a column with LN, and with UN folded, by row of the table."""
    import torch
    from normkit_papers.data.vocab import Vocab
    from normkit_papers.recipes import RECIPES
    from normkit_papers.study import override
    from normkit_papers.train.build import build_model
    from normkit_papers.train.fold_run import fold_run
    from normkit_papers.train.folder import Loaded

    from normkit.norms import StatNorm

    recipe, settings, _ = MODELS[column]
    classes, found = {"classes": Vocab(str(number) for number in range(80))}, {}
    for row, norm in NORMS.items():
        run = override(RECIPES[recipe](), {**settings[scale], "model.norm": norm})
        torch.manual_seed(0)
        model = build_model(run.task, run.model, classes).eval()
        for module in model.modules():
            if isinstance(module, StatNorm):
                module.running.uniform_(0.5, 1.5)
        found[row] = model if norm == "layer" else fold_run(Loaded(run, model, classes))[0].model
    return found


def peak(call: Any, device: str) -> float:
    """Memory that a call allocates beyond what it begins with, at its peak, in MB."""
    import torch

    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    now, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 1e6


def measure_column(column: str, scale: str, rounds: int, device: str) -> list[dict[str, Any]]:
    """Rows of the table's CSV: one for LN, one for UN."""
    import torch

    from normkit.bench import measure

    made, images = models(column, scale), MODELS[column][2]
    batch = torch.rand(images, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0)).to(device)
    batch = batch if column == "ImageNet" else list(batch)

    def caller(model: Any) -> Any:
        model.to(device)

        def call() -> None:
            with torch.inference_mode():
                model(batch)

        return call

    calls = {row: caller(model) for row, model in made.items()}
    timings, memory = measure(calls, rounds, device=device), {row: peak(call, device) for row, call in calls.items()}
    found = timings.ratio("UN", "LN")
    print(f"{column}: time of UN {found.median:.3f} ({found.low:.3f} to {found.high:.3f}) of LN's, LN against itself "
          f"{timings.noise:.3f}; memory {memory['UN'] / memory['LN']:.3f}; {timings.obstacle or 'ok'}")  # fmt: skip
    return [
        {
            "study": "un.table8", "scale": scale, "row": row, "column": f"{column} MEM | {column} TPUT", "seed": 0,
            "status": "done", "memory": memory[row], "speed": images / timings.median(row),
            "time ratio": found.median if row == "UN" else 1.0, "low": found.low if row == "UN" else "",
            "high": found.high if row == "UN" else "", "noise": timings.noise, "steps": "", "minutes": "",
            "parameters": sum(parameter.numel() for parameter in model.parameters()), "items": "",
            "data": f"{images} image{'s' * (images > 1)} of {IMAGE} x {IMAGE} at a time, random weights",
            "command": " ".join(["python benchmarks/un_table8.py", *sys.argv[1:]]), "commit": commit(),
            "device": torch.cuda.get_device_name() if device == "cuda" else processor(), "threads": 1,
            "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(), "run": f"{column} {scale} {row}",
        }
        for row, model in made.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    kept = Path(__file__).parents[1] / "papers" / "results" / "un.table8.csv"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="pocket", choices=("pocket", "paper"))
    parser.add_argument("--columns", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=60, help="fewer allow no verdict")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=kept)
    given = parser.parse_args(arguments)
    from normkit_papers.studies.rows import append

    for column in given.columns:
        append(given.out, measure_column(column, given.scale, given.rounds, given.device))


if __name__ == "__main__":
    quiet()
    main()
