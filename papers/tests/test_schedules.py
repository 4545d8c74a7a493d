"""Learning rates against the papers' formulas, and their state."""

import math

import pytest
import torch
from normkit_papers.train.config import Run
from normkit_papers.train.schedules import Constant, InverseSqrt, ValidationDecay, cosine


def optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def rates(schedule, steps: int) -> list[float]:
    """Learning rates of steps 1, 2, ..., as the optimizer uses them."""
    out = []
    for _ in range(steps):
        out.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return out


def test_inverse_sqrt_is_equation_7_of_tears():
    d, warmup, scale = 512, 40, 1.0
    schedule = InverseSqrt(optimizer(scale / math.sqrt(d * warmup)), warmup)
    expected = [scale / math.sqrt(d) * min(n**-0.5, n * warmup**-1.5) for n in range(1, 200)]
    assert rates(schedule, 199) == pytest.approx(expected, rel=1e-12)


def test_inverse_sqrt_can_start_as_fairseq_does():
    schedule = InverseSqrt(optimizer(7e-4), 10, start=1e-7)
    got = rates(schedule, 20)
    assert got[:9] == pytest.approx([1e-7 + n * (7e-4 - 1e-7) / 10 for n in range(1, 10)])
    assert got[9:] == pytest.approx([7e-4 * math.sqrt(10 / n) for n in range(10, 21)])


def test_constant_with_and_without_warm_up():
    assert rates(Constant(optimizer(0.5)), 3) == [0.5] * 3
    assert rates(Constant(optimizer(1.0), 4), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_cosine_rises_falls_and_ends_at_the_floor():
    got = rates(cosine(optimizer(1.0), 4, 20), 21)
    assert got[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert got[4:20] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 16)) for i in range(16)])
    assert got[20] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="below steps=5"):
        cosine(optimizer(), 5, 5)


def test_validation_decay_compares_the_best():
    schedule = ValidationDecay(optimizer(1.0), patience=3)
    scores = [10, 12, 11, 11.5, 11.9, 13, 12, 12, 12, 12]
    assert [schedule.validated(s) for s in scores] == [False] * 4 + [True] + [False] * 3 + [True, False]
    assert schedule.optimizer.param_groups[0]["lr"] == pytest.approx(0.64)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: InverseSqrt(o, 5),
        lambda o: Constant(o, 5),
        lambda o: ValidationDecay(o, 5),
        lambda o: cosine(o, 3, 30),
    ],
)
def test_state_round_trips(make):
    one, two = make(optimizer(1.0)), make(optimizer(1.0))
    rates(one, 7)
    if isinstance(one, ValidationDecay):
        for _ in range(4):
            one.validated(1.0)
    two.load_state_dict(one.state_dict())
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    assert rates(two, 10) == rates(one, 10)


def test_settings_without_a_schedule_raise_before_a_run_begins():
    settings = {"name": "x", "task": "digits", "data": "digits", "steps": 9, "schedule": "steps"}
    Run(**settings, milestones=(4, 6), warmup=3)
    with pytest.raises(ValueError, match=r"milestones must be after the warm-up of 4 steps; got \(4, 6\)"):
        Run(**settings, milestones=(4, 6), warmup=4)
    with pytest.raises(ValueError, match=r"warmup_start must be at most lr=0\.003; got 0\.1"):
        Run(**settings, warmup=3, warmup_start=0.1)
    settings |= {"schedule": "cosine", "lr": 1e-3, "floor_lr": 1e-4}
    Run(**settings)
    tuned = {"task": "images", "data": "cifar10", "weights": "x"}
    with pytest.raises(ValueError, match=r"floor_lr must be at most lr \* body_lr = 0; got 0\.0001"):
        Run(**(settings | tuned), body_lr=0.0)  # the rate of the body would rise to the floor
    for change in ({"schedule": "validation_decay"}, {"optimizer": "nt-asgd"}):
        with pytest.raises(ValueError, match=r"valid_every must be above 0 for .*; got 0"):
            Run(**(settings | change))


def test_bad_settings_raise():
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        InverseSqrt(optimizer(), 0)
    with pytest.raises(ValueError, match="warmup must be at least 0"):
        Constant(optimizer(), -1)
    with pytest.raises(ValueError, match="factor"):
        ValidationDecay(optimizer(), factor=1.5)
