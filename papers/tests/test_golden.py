"""Losses of steps 10 and 20, which show changes of arithmetic, weights or data order.

Made with torch 2.13.0. After an intended change, take the new ones and state the reason in the commit. The tolerance is
wide enough for other processors and math libraries, and far below what any change would do.
"""

import dataclasses
from pathlib import Path

import pytest
from normkit_papers.models.config import Model
from normkit_papers.train.config import DigitsRun
from normkit_papers.train.run import train

TOLERANCE = 2e-3
RUN = DigitsRun(
    name="golden",
    data="digits",
    model=Model(width=32, hidden=48, depth=2, heads=4),
    steps=20,
    batch_tokens=32,
    lr=3e-3,
    warmup=5,
    threads=1,
)
GOLDEN = {
    "layer": [2.36138, 2.29267],
    "scale": [2.39217, 2.28446],
    "batch": [2.08092, 2.01483],
    "un(warmup=8)": [2.19912, 2.13194],
    "power(groups=0, warmup=8)": [2.26077, 2.14616],
}


def losses(norm: str, folder: Path) -> list[float]:
    model = dataclasses.replace(RUN.model, norm=norm)
    result = train(dataclasses.replace(RUN, model=model), folder)
    return [round(result["curve"][step - 1]["train_loss"], 5) for step in (10, 20)]


@pytest.mark.parametrize("norm", GOLDEN)
def test_losses_of_the_first_steps(norm, tmp_path):
    found = losses(norm, tmp_path)
    assert found == pytest.approx(GOLDEN[norm], rel=TOLERANCE)
