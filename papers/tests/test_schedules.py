"""Learning rates against the papers' formulas, and their state."""

import math

import pytest
import torch
from normkit_papers.train.config import DigitsRun
from normkit_papers.train.schedules import Schedule


def made(**settings):
    run = DigitsRun(name="x", data="digits", **{"steps": 20, "lr": 1.0, "valid_every": 1, **settings})
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": run.lr * part} for part in (1, 0.1)]
    return Schedule(torch.optim.SGD(groups, lr=run.lr), run)


def rates(schedule, steps):
    """Learning rates of both groups at each step, as the optimizer uses them."""
    out = []
    for _ in range(steps):
        out.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1.0] * 3),
        ({"schedule": "constant", "warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "steps", "warmup": 2, "milestones": (3, 5)}, [0.5, 1, 1, 0.1, 0.1, 0.01]),
        (  # Equation 7 of Tears, d = 512
            {"schedule": "inverse_sqrt", "warmup": 40, "lr": (512 * 40) ** -0.5, "steps": 300},
            [512**-0.5 * min(n**-0.5, n * 40**-1.5) for n in range(1, 200)],
        ),
    ],
)
def test_rates_are_those_of_the_formula_for_each_group(settings, expected):
    got = rates(made(**settings), len(expected))
    assert [rate for rate, _ in got] == pytest.approx(expected, rel=1e-12)
    assert [rate for _, rate in got] == pytest.approx([0.1 * rate for rate in expected], rel=1e-12)


def test_inverse_sqrt_can_start_as_fairseq_does():
    got = rates(made(schedule="inverse_sqrt", warmup=10, lr=7e-4, warmup_start=1e-7), 20)
    expected = [1e-7 + n * (7e-4 - 1e-7) / 10 for n in range(1, 10)] + [7e-4 * math.sqrt(10 / n) for n in range(10, 21)]
    assert [rate for rate, _ in got] == pytest.approx(expected)


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_cosine_rises_to_the_peak_and_falls_to_the_floor(start):
    got = rates(made(warmup=4, floor_lr=0.02, warmup_start=start), 20)
    first = start or 0.25
    assert [rate for rate, _ in got[:4]] == pytest.approx([first + (1 - first) * n / 3 for n in range(4)])
    for group, peak in ((0, 1.0), (1, 0.1)):
        expected = [0.02 + (peak - 0.02) * (1 + math.cos(math.pi * n / 16)) / 2 for n in range(16)]
        assert [both[group] for both in got[4:]] == pytest.approx(expected)


def test_validation_decay_compares_the_best():
    schedule = made(schedule="validation_decay")
    rate = []
    for score in (10, 12, 11, 11.5, 11.9, 13, 12, 12, 12, 12):
        schedule.validated(score)
        rate.append(schedule.optimizer.param_groups[0]["lr"])
    assert rate == pytest.approx([1.0] * 4 + [0.8] * 4 + [0.64] * 2)


@pytest.mark.parametrize("kind", ["cosine", "inverse_sqrt", "constant", "validation_decay"])
def test_state_round_trips(kind):
    one, two = (made(schedule=kind, warmup=3) for _ in range(2))
    rates(one, 7)
    for _ in range(4):
        one.validated(1.0)
    two.load_state_dict(one.state_dict())
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    assert rates(two, 10) == rates(one, 10)
