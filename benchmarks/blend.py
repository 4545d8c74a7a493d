"""Fine-tune a LayerNorm model into one with offline norms: by a hard swap, or by a blend.

    python benchmarks/blend.py --steps 5000 --tune 250 500 1000 --seeds 0 1 2 --out results/blend.json

Trains `g2p_cmudict` with LayerNorm (or takes trained runs: --base FOLDER ...), then for each norm and each number of
fine-tuning steps: phoneme error rates (%) of greedy search on 2,000 test words

- "swapped": LayerNorm replaced, statistics calibrated (precise, 4 passes), no training;
- "hard": replaced and calibrated at the first step, fine-tuned;
- "blend": LayerNorm is replaced gradually during the first 60 % of the same fine-tuning;
- "layer": the LayerNorm model with the same fine-tuning, for comparison;

and of the blended model folded, with the largest error of its verification.
"""

import argparse
import copy
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from normkit.lab.data.embedded import SOURCES
from normkit.lab.studies.catalogue import RECIPES
from normkit.lab.tasks import TASKS
from normkit.lab.train.config import Run
from normkit.lab.train.environment import environment
from normkit.lab.train.folder import load
from normkit.lab.train.run import train
from normkit.transforms import blend, calibrate, convert, fold, settle

CALIBRATION = 200
LR = 1e-3  # a third of the recipe's peak


def forward(model: nn.Module, batch):
    source, given, _ = batch.tensors
    return model(source, given)


def task_of(run: Run, model: nn.Module, data):
    return TASKS[run.task].load("module")(run, model, data)


def first_batches(task, count: int) -> list:
    return [batch for batch, _ in zip(task.batches(0), range(count), strict=False)]


def tune(run: Run, model: nn.Module, data, steps: int, seed: int) -> nn.Module:
    """Fine-tune with a short warm-up, then a cosine to zero, on data in a new order."""
    torch.manual_seed(1000 + seed)
    task = task_of(run, model.train(), data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=run.betas, weight_decay=0.0)
    wave = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    for _, batch in zip(range(steps), task.batches(100_000 + 7919 * seed), strict=False):
        loss = task.loss(batch, run.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        wave.step()
    return model.eval()


def score(run: Run, model: nn.Module, data) -> float:
    return task_of(run, model, data).score_test()["per"]


def study(folder: Path, norms: list[str], steps: list[int], seed: int) -> list[dict]:
    run, model, vocabularies = load(folder)
    data = SOURCES[run.data]()
    batches = first_batches(task_of(run, model, data), CALIBRATION)
    rows = [{"seed": seed, "norm": "layer", "how": "trained", "steps": 0, "per": score(run, model, data)}]
    for n in steps:
        tuned = tune(run, copy.deepcopy(model), data, n, seed)
        rows.append({"seed": seed, "norm": "layer", "how": "layer", "steps": n, "per": score(run, tuned, data)})
    for norm in norms:
        swapped = calibrate(convert(model, norm), batches, forward=forward, passes=4).eval()
        rows.append({"seed": seed, "norm": norm, "how": "swapped", "steps": 0, "per": score(run, swapped, data)})
        for n in steps:
            hard = tune(run, copy.deepcopy(swapped), data, n, seed)
            soft = settle(tune(run, blend(model, norm, steps=max(1, int(0.6 * n))), data, n, seed))
            for how, each in (("hard", hard), ("blend", soft)):
                done = calibrate(each, batches, forward=forward).eval()
                rows.append({"seed": seed, "norm": norm, "how": how, "steps": n, "per": score(run, each, data),
                             "calibrated": score(run, done, data)})  # fmt: skip
            example = TASKS[run.task].load("example")(run.model, vocabularies)
            folded, report = fold(soft.eval(), *example, untie=True)
            rows.append({"seed": seed, "norm": norm, "how": "folded", "steps": n, "per": score(run, folded, data),
                         "folded": report.foldable, "max_error": report.max_error})  # fmt: skip
            latest = [row for row in rows if (row["norm"], row["steps"]) == (norm, n)]
            print(norm, n, *(f"{row['how']} {row['per']:.2f}" for row in latest), flush=True)
    return rows


def table(rows: list[dict]) -> str:
    lines = ["norm                     how      steps   PER %  (mean over seeds, lowest to highest)"]
    for key in dict.fromkeys((row["norm"], row["how"], row["steps"]) for row in rows):
        found = [row["per"] for row in rows if (row["norm"], row["how"], row["steps"]) == key]
        spread = f"{min(found):.2f} to {max(found):.2f}, n={len(found)}"
        lines.append(f"{key[0]:24} {key[1]:8} {key[2]:5}  {statistics.mean(found):6.2f}  {spread}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="training steps of the LayerNorm model")
    parser.add_argument("--tune", type=int, nargs="+", default=[250, 500, 1000], help="fine-tuning steps to try")
    parser.add_argument("--placement", choices=("pre", "post"), default="pre", help="where the norms are")
    parser.add_argument("--depth", type=int, default=2, help="layers of the encoder and of the decoder")
    parser.add_argument("--norms", nargs="+", default=["un(warmup=0)", "batch"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base", type=Path, nargs="*", default=[], help="trained runs, one a seed")
    parser.add_argument("--out", type=Path, default=Path("results/blend.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.perf_counter(), []
    for index, seed in enumerate(given.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            folder = given.base[index] if given.base else Path(scratch) / "layer"
            if not given.base:
                recipe = RECIPES["g2p_cmudict"]()
                model = dataclasses.replace(recipe.model, placement=given.placement, depth=given.depth)
                settings = {**vars(recipe), "model": model, "steps": given.steps, "seed": seed,
                            "warmup": given.steps // 10, "valid_every": 0, "checkpoint_every": 0,
                            "record_every": 0}  # fmt: skip
                train(Run(**settings), folder)
            rows += study(folder, given.norms, given.tune, seed)
    print(table(rows))
    result = {"what": __doc__.splitlines()[0], "settings": {k: str(v) for k, v in vars(given).items()}, "rows": rows,
              "where": environment(), "seconds": time.perf_counter() - started}  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
