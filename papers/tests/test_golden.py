"""Losses of the first 20 steps, which show changes of arithmetic, weights or data order.

Made with torch 2.13.0. After an intended change, regenerate with `python tests/test_golden.py` and state the reason in
the commit. The tolerance is wide enough for other processors and math libraries, and far below what any change would
do.
"""

import dataclasses
import tempfile
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
    "layer": [2.34496, 2.43289, 2.30171, 2.2942, 2.36051, 2.32946, 2.37743, 2.26909, 2.29785, 2.36138, 2.34388, 2.3332,
              2.38644, 2.3727, 2.34214, 2.27601, 2.30319, 2.31706, 2.29346, 2.29267],
    "scale": [2.3506, 2.43994, 2.30368, 2.30331, 2.35083, 2.32872, 2.35974, 2.24639, 2.29597, 2.39217, 2.36393, 2.34859,
              2.40328, 2.40013, 2.33769, 2.26865, 2.30843, 2.33711, 2.28404, 2.28446],
    "batch": [2.39704, 2.45676, 2.26683, 2.25033, 2.25953, 2.16162, 2.19234, 2.13334, 2.12647, 2.08092, 2.1045, 2.05837,
              2.00767, 1.99981, 1.86133, 2.07915, 2.02665, 2.00782, 1.93078, 2.01483],
    "un(warmup=8)": [2.35918, 2.44553, 2.26439, 2.25013, 2.32906, 2.28673, 2.13452, 2.16819, 2.12261, 2.19912, 2.33652,
                     2.10825, 2.14694, 2.09196, 2.05458, 2.13768, 2.05827, 2.16898, 1.95391, 2.13194],
    "power(groups=0, warmup=8)": [
        2.35918, 2.44553, 2.26439, 2.25013, 2.32906, 2.28673, 2.13452, 2.17623, 2.27242, 2.26077, 2.34967, 2.13523,
        2.12952, 2.07976, 2.0937, 2.14441, 2.08734, 2.16501, 1.97604, 2.14616,
    ],
}  # fmt: skip


def losses(norm: str, folder: Path) -> list[float]:
    model = dataclasses.replace(RUN.model, norm=norm)
    result = train(dataclasses.replace(RUN, model=model), folder)
    return [round(point["train_loss"], 5) for point in result["curve"]]


@pytest.mark.parametrize("norm", GOLDEN)
def test_losses_of_the_first_steps(norm, tmp_path):
    found = losses(norm, tmp_path)
    assert found == pytest.approx(GOLDEN[norm], rel=TOLERANCE)


if __name__ == "__main__":
    for spec in GOLDEN:
        with tempfile.TemporaryDirectory() as made:
            print(f'    "{spec}": {losses(spec, Path(made))},')
