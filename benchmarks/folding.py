"""Time that `fold` takes, in forwards of the model, and its stages.

    OMP_NUM_THREADS=1 python benchmarks/folding.py [--models vit resnet] [--rounds 3]

The models have random weights and statistics, and an example of two pictures of 224 or of 128 tokens. `fold` and one
forward take turns on one thread, pinned to a core. Writes benchmarks/results/folding.json, and from it the table of
docs/guides/folding.md.
"""

import argparse
import importlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from deploy_models import make, used, with_random_statistics
from torchvision_stub import load_torchvision
from normkit_papers.report import markdown
from normkit_papers.train.environment import environment
from torch import nn

from normkit.bench import measure
from normkit.fold import fold

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "folding.json", ROOT / "docs" / "guides" / "folding.md"
MODELS = {"vit": "ViT-S/16", "resnet": "ResNet-18", "swin": "Swin-T", "bert": "BERT-base", "gpt2": "GPT-2 small"}


def model_and_example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose norms are offline, and the keyword arguments of a call."""
    load_torchvision()
    if name == "resnet":
        import timm

        torch.manual_seed(0)
        return timm.create_model("resnet18").eval(), {"x": torch.randn(2, 3, 224, 224)}
    subject = make(name)
    example = subject.inputs(1 if name in ("bert", "gpt2") else 2)
    if name == "gpt2":
        example = {"input_ids": torch.randint(5, 50000, (1, 128))}
    return with_random_statistics(subject.model), example


def timed(name: str, rounds: int) -> dict[str, Any]:
    """Time `fold` and one forward by turns, and the stages of the last fold."""
    module: Any = importlib.import_module("normkit.fold.fold")
    stages: list[tuple[str, float]] = []

    class Stages(module.Steps):
        def __call__(self, label: str) -> None:
            stages.append((label, time.perf_counter()))

        def __exit__(self, *error: object) -> None:
            self("")

    module.Steps = Stages
    model, example = model_and_example(name)
    reports = []

    def run() -> None:
        stages[:] = [("copy", time.perf_counter())]
        reports.append(fold(model, outputs=used, **example)[1])

    timings = measure({"forward": lambda: model(**example), "fold": run}, rounds)
    ratio = timings.ratio("fold", "forward")
    seconds: dict[str, float] = {}
    for (label, start), (_, end) in itertools.pairwise(stages):
        stage = label.split()[0]  # "trace the example", "trace 127 tokens"
        seconds[stage] = round(seconds.get(stage, 0) + end - start, 2)
    return {
        "model": name, "gone": reports[-1].foldable, "tried": reports[-1].tried, "n": rounds, "noise": timings.noise,
        "forward_ms": round(1000 * timings.median("forward"), 1), "seconds": round(timings.median("fold"), 2),
        "forwards": [ratio.median, ratio.low, ratio.high], "stages": seconds,
    }  # fmt: skip


def table(result: dict) -> str:
    """The table of docs/guides/folding.md."""
    lines = []
    for row in result["rows"]:
        limit = f"{20 * row['forward_ms'] / 1000 + 2:.1f}"
        times = f"{row['forward_ms']:.0f}", f"{row['seconds']:.1f}", f"{row['forwards'][0]:.0f}", limit
        lines.append((MODELS[row["model"]], row["gone"], *times))
    where, rounds = result["where"], result["rows"][0]["n"]
    about = f"Median of {rounds} rounds on one thread of an {where['device']}; commit {where['commit'][:7]}."
    head = ("model", "norms gone", "a forward, ms", "`fold`, s", "in forwards", "20 forwards + 2 s")
    return "\n".join([markdown.table(head, lines), "", about, "Command: `python benchmarks/folding.py`."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = []
    for name in given.models:
        rows.append(timed(name, given.rounds))
        print(json.dumps(rows[-1]), flush=True)
    result = {"rows": rows, "where": environment("cpu")}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    PAGE.write_text(markdown.fill(PAGE.read_text(encoding="utf8"), {"folding": table(result)}.get), encoding="utf8")


if __name__ == "__main__":
    main()
