"""Time of training steps of the demo's small model, relative to LayerNorm.

    python benchmarks/steps.py [--norms SPEC ...] [--rounds 60] [--out FILE]
    python benchmarks/steps.py --compile --out benchmarks/results/steps_compiled_cpu.csv

The model has 0.4 million parameters and 12 norms, so that time in Python counts: the worst case. A call trains on four
fixed batches of the demo's data: forward, backward, clipping and optimizer. Variants take turns on one pinned thread.
Norms are past their warm-up; "SPEC in its warm-up" stays in the automatic one. "SPEC + scale loss" adds the scale loss,
which models compiled by this command do not take.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import rows
import torch
from normkit_papers.recipes import RECIPES
from normkit_papers.tasks import TASKS
from normkit_papers.train.build import build_model
from normkit_papers.train.source import source

from normkit.bench import measure, skip_warmup
from normkit.norms import Norm

NORMS = (
    "layer", "rms", "scale", "power(groups=0)", "power(groups=1)", "pnv", "batch", "mabn", "un",
    "un(outlier_filtration=True)",
)  # fmt: skip
EARLY, SCALED = " in its warm-up", " + scale loss"
BATCHES = 4
FIELDS = ("device", "commit", "torch", "compiled", "norm", "rounds", "ms", "low", "ratio", "high", "noise")


def steps(spec: str, compiled: bool) -> Callable[[], None]:
    """Return a function that trains on four batches."""
    torch.manual_seed(0)
    recipe = RECIPES["g2p_cmudict"]()
    norm = spec.removesuffix(SCALED).removesuffix(EARLY)
    scale_loss = 0.1 if spec.endswith(SCALED) else 0.0
    run = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, norm=norm), scale_loss=scale_loss)
    data = source(run)()
    model = build_model(run.task, run.model, data.vocabularies)
    task = TASKS[run.task].load("module")(run, model, data)
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    for module in norms:
        if EARLY not in spec:
            skip_warmup(module)
        else:
            module.lag.fill_(math.nan)  # never below the limit: the warm-up lasts
    batches = list(itertools.islice(task.batches(0), BATCHES))
    task.on_train_start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if compiled:
        model.compile(dynamic=True)

    def call() -> None:
        for batch in batches:
            task.training_step(batch, 0)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return call


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the models by torch.compile")
    parser.add_argument("--norms", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/steps_cpu.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    norms = args.norms or (*NORMS, "un" + EARLY, *([] if args.compile else ["un" + SCALED]))
    calls = {spec: steps(spec, args.compile) for spec in ("layer", *(n for n in norms if n != "layer"))}
    for call in calls.values():
        call()
    timings, table = measure(calls, args.rounds), []
    for spec in calls:
        found = timings.ratio(spec, "layer")
        table.append({
            "device": rows.processor(), "commit": rows.commit(), "torch": torch.__version__,
            "compiled": args.compile, "norm": spec, "rounds": args.rounds,
            "ms": round(1e3 * timings.median(spec) / BATCHES, 2), "low": round(found.low, 3),
            "ratio": round(found.median, 3), "high": round(found.high, 3), "noise": round(timings.noise, 3),
        })  # fmt: skip
        print("  ".join(f"{table[-1][f]!s:>16s}" for f in FIELDS[4:]), flush=True)
    rows.keep(args.out, FIELDS, ("device", "compiled", "norm"), table)


if __name__ == "__main__":
    main()
