"""Automatic warm-up ends by drift, at the same step in kernels, graphs and recomputation."""

import math

import pytest
import torch
from normkit_papers.study import with_options
from torch.utils.checkpoint import checkpoint

import normkit as nk

SPECS = ("un", "power(groups=0)", "mabn")
DIM = 16


def batches(steps: int, growth: int, rows: int = 50) -> list[torch.Tensor]:
    """Batches whose scale grows for `growth` steps, with noise from batch to batch."""
    generator = torch.Generator().manual_seed(1)
    scales = [1 + 3 * min(step, growth) / max(growth, 1) for step in range(steps)]
    return [
        torch.randn(rows, DIM, generator=generator) * scale * torch.exp(0.1 * torch.randn((), generator=generator))
        for scale in scales
    ]


def train(norm, given, run=None):
    """Run forward and backward on each batch; return the last gradient."""
    direction = torch.sin(torch.arange(DIM * len(given[0])).float()).view(-1, DIM)
    for batch in given:
        x = batch.clone().requires_grad_()
        ((norm if run is None else run)(x) * direction).sum().backward()
    return x.grad


@pytest.mark.parametrize("spec", SPECS)
def test_the_warmup_ends_after_the_drift(spec):
    ends = []
    for growth in (0, 100, 200):
        norm = nk.make(spec, DIM)
        train(norm, batches(330, growth))
        ends.append(int(norm.warmup_end))
    assert 60 < ends[0] < 120 < ends[1] < 200 < ends[2] < 330


@pytest.mark.parametrize("spec", SPECS)
def test_kernels_compiled_graphs_and_checkpointing_end_it_at_the_same_step(spec):
    given, plain = batches(190, 40), nk.make(spec, DIM)
    with nk.kernels("reference"):
        expected = train(plain, given)
    assert 0 < int(plain.warmup_end) < 180
    native, compiled, saved = (nk.make(spec, DIM) for _ in range(3))
    ways = (
        (native, None),
        (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True)),
        (saved, lambda x: checkpoint(saved, x, use_reentrant=False)),
    )
    for norm, run in ways:
        torch.testing.assert_close(train(norm, given, run), expected, rtol=1e-4, atol=1e-5)
        assert int(norm.warmup_end) == int(plain.warmup_end)
        torch.testing.assert_close(norm.averages, plain.averages)


def test_batches_that_are_not_finite_and_padding_do_not_count():
    given = batches(190, 40)
    norm, other = nk.make(SPECS[0], DIM), nk.make(SPECS[0], DIM)
    train(norm, given)
    for x in given:
        padded = torch.cat([x, torch.full_like(x[:7], 1e4)])
        mask = torch.arange(len(padded)) < len(x)
        other(padded, mask)
        other(torch.full_like(x, math.nan))
    assert int(other.warmup_end) == int(norm.warmup_end) > 0
    assert int(other.skipped) == len(given)


@pytest.mark.parametrize("spec", SPECS)
def test_norms_with_a_number_and_with_auto_load_each_other(spec):
    fixed, auto = nk.make(with_options(spec, {"warmup": 20}), DIM), nk.make(spec, DIM)
    train(fixed, batches(190, 40))
    auto.load_state_dict(fixed.state_dict())
    train(auto, batches(150, 0)[:20])
    assert int(auto.warmup_end) == 0 < float(auto.lag)
    fixed.load_state_dict(auto.state_dict())
