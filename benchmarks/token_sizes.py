"""Sizes of tokens at the norms of trained runs, and the effect of dropout on statistics.

    NORMKIT_DATA=FOLDER python benchmarks/token_sizes.py runs/studies/pocket/ted.gl.long/*/seed-0

Takes runs on text. A row for each norm, on validation batches in evaluation mode: `share` is `token_share` of
`normkit.record`, `largest` the 99th percentile of the tokens' root mean squares over their median, `running` the
running mean square over that of 50 calibration batches, which run without dropout (geometric mean over channels).
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from normkit_papers.tasks import TASKS
from normkit_papers.train.calibrate_run import calibrate_run
from normkit_papers.train.folder import load
from normkit_papers.train.source import open_task
from torch import Tensor, nn

from normkit._util import align
from normkit.models.invoke import input_and_mask
from normkit.norms import Norm, StatNorm

BATCHES, CALIBRATED = 6, 50


@torch.no_grad()
def sizes(task: Any) -> dict[str, Tensor]:
    """Return the root mean squares of real tokens, `[tokens]`, by norm."""
    found: dict[str, list[Tensor]] = {}

    def measure(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        x, mask = input_and_mask(args, kwargs)
        x = x if mask is None else x[mask]
        found.setdefault(name, []).append(x.square().mean(-1).sqrt().flatten())

    for name, module in task.model.named_modules():
        if isinstance(module, Norm):
            hook = lambda module, args, kwargs, name=name: measure(name, args, kwargs)  # noqa: E731
            module.register_forward_pre_hook(hook, with_kwargs=True)
    for batch in itertools.islice(task.validation_batches(), BATCHES):
        task.forward_norms(task.model, batch)
    return {name: torch.cat(each) for name, each in found.items()}


def ratio(norm: nn.Module, calibrated: nn.Module) -> str:
    """Format the running mean square over the calibrated one; empty without such a one."""
    if not isinstance(norm, StatNorm) or norm.running.shape[0] != 1:
        return ""
    return f"{float((norm.running / calibrated.running).log().mean().exp()):.2f}"  # type: ignore[operator]


def main() -> None:
    """Print a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    for folder in parser.parse_args().runs:
        loaded = load(folder)
        run, model = loaded.run, loaded.model
        if TASKS[run.task].unit != "tokens":
            parser.error(f"{folder} is a run of task {run.task}; this script takes runs on text")
        stateful = any(isinstance(module, StatNorm) for module in model.modules())
        calibrated = calibrate_run(loaded, CALIBRATED)[0].model if stateful else model
        task = open_task(loaded)
        rows = [("norm", "share", "largest", "running")]
        for name, size in sizes(task).items():
            energy = size.square()
            share, largest = energy.mean().square() / energy.square().mean(), size.quantile(0.99) / size.median()
            last = ratio(model.get_submodule(name), calibrated.get_submodule(name))
            rows.append((name, f"{float(share):.2f}", f"{float(largest):.1f}", last))
        print(f"{folder}\n{align(rows, right=range(1, 4), heads=1)}\n", flush=True)


if __name__ == "__main__":
    main()
