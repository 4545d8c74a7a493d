"""Drift of the statistics of `un` while a model trains, and ends of automatic warm-ups.

    NORMKIT_DATA=FOLDER python benchmarks/drift.py mt_ted_gl_pocket --steps 800 --warmup 100
    python benchmarks/drift.py g2p_cmudict --steps 2000 --warmup 360

The model trains with `un` that never leaves its warm-up. Printed is, for some steps, the change of log mean squares in
ten steps relative to their noise between batches (root mean square over channels, median of the norms), then the steps
at which `warmup="auto"` would end, and its `lag` without drift: on the last 300 batches in random order, after 100.
"""

import argparse
import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from normkit_papers.studies.catalogue import RECIPES
from normkit_papers.train.run import train
from torch import Tensor

from normkit.norms import UN

AROUND = 24  # steps before and after, whose means are compared
SHOWN = (25, 50, 100, 150, 200, 300, 400, 500, 600, 700, 1000, 1500)


def record(recipe: str, steps: int, warmup: int) -> list[Tensor]:
    """Return the mean squares `[steps, channels]` of each norm's batches."""
    found, rule = defaultdict(list), UN.train_stat

    def watched(norm: UN, batch: Tensor, step: Tensor, count: Tensor):
        found[norm].append(batch[0].clone())
        return rule(norm, batch, step, count)

    run = RECIPES[recipe]()
    run = dataclasses.replace(
        run, steps=steps, warmup=warmup, valid_every=steps, checkpoint_every=steps, record_every=0, test_items=8,
        model=dataclasses.replace(run.model, norm=f"un(warmup={10 * steps})"),
    )  # fmt: skip
    kernels = mock.patch.object(UN, "kernel_rule", return_value=None)
    with mock.patch.object(UN, "train_stat", watched), kernels, tempfile.TemporaryDirectory() as folder:
        train(run, Path(folder))
    return [torch.stack(each) for each in found.values()]


def drift(squares: Tensor, step: int) -> float:
    """Return the change in ten steps, relative to the noise between batches."""
    before, after = squares[step - AROUND : step].log(), squares[step : step + AROUND].log()
    noise = (before.var(0, correction=0) + after.var(0, correction=0)).mean() / 2
    change = (after.mean(0) - before.mean(0)).square().mean() - 2 * noise / AROUND
    return float((change.clamp(min=0) / noise).sqrt() * 10 / AROUND)


def automatic(squares: Tensor) -> tuple[int, Tensor]:
    """Return the last step of an automatic warm-up on these statistics, and `lag` by step."""
    norm, end, lags = UN(squares.shape[1], warmup="auto"), 0, []
    for number, batch in enumerate(squares, 1):
        for name, value in norm.drift_state(batch[None], torch.tensor(number)).items():
            getattr(norm, name).copy_(value)
        end = end or int(norm.warmup_end)
        norm.warmup_end.zero_()  # so that `lag` goes on
        lags.append(norm.lag.clone())
    return end, torch.stack(lags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True, help="of the learning rate")
    given = parser.parse_args()
    norms = record(given.recipe, given.steps, given.warmup)
    for step in (step for step in SHOWN if step + AROUND <= given.steps):
        print(f"step {step:5,}: {torch.tensor([drift(squares, step) for squares in norms]).median():.2f}")
    print("warm-ups end at", *sorted(automatic(squares)[0] for squares in norms))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    lags = torch.stack([automatic(squares[-300:][order])[1][100:] for squares in norms])
    print(f"lag without drift: {lags.median():.3f}, at most {lags.max():.3f}")


if __name__ == "__main__":
    main()
