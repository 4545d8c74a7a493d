"""Norms that users change or write, and transforms of torch.func."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import normkit


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("spec", ["pnv(bias=False)", "batch", "un", "power(groups=2)", "rms(bias=True)"])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_gain_or_bias_of_another_shape_is_broadcast(choice, spec, shape):
    norm = normkit.make(spec, 6)
    for key in [key for key in ("weight", "bias") if getattr(norm, key) is not None]:
        setattr(norm, key, nn.Parameter(torch.full(shape, 2.0)))
    x, dy, found = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6), []
    for kernels in (choice, "reference"):
        with normkit.kernels(kernels):
            y = copy.deepcopy(norm)(x)
            found.append((y, *torch.autograd.grad(y, x, dy)))
    torch.testing.assert_close(*found)


def test_a_rule_may_return_a_buffer():
    class Before(normkit.norms.StatNorm):
        exact_grad = False

        def train_stat(self, batch, step, count, state):
            return normkit.norms.Stat(state.running.to(batch.dtype), {"running": self.average(batch, state)})

    norm = Before(2, eps=0.0)
    torch.testing.assert_close(norm(torch.full((4, 2), 10.0)), torch.full((4, 2), 10.0))
    assert norm.running[0, 0] == pytest.approx(0.9 + 0.1 * 100)


def test_training_in_transforms_of_torch_func_raises():
    norm, x = normkit.make("batch", 4), torch.randn(6, 4)
    state = {name: t.clone() for name, t in norm.named_buffers()}

    def loss(parameters):
        return torch.func.functional_call(norm, (parameters, state), (x,)).sum()

    with pytest.raises(RuntimeError, match="eval"):
        torch.func.grad(loss)(dict(norm.named_parameters()))
    norm.eval()
    torch.func.grad(loss)(dict(norm.named_parameters()))


def test_training_in_forward_mode_raises():
    norm, x = normkit.make("un", 4), torch.randn(6, 4)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="eval"):
        norm(forward_ad.make_dual(x, x))
    assert norm.step == 0


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_batched_gradients_of_a_norm_that_keeps_their_statistics_raise(choice):
    norm, x = normkit.make("un", 4), torch.randn(6, 4, requires_grad=True)
    with normkit.kernels(choice):
        y = norm(x)
        with pytest.raises(RuntimeError, match="vmap"):
            torch.autograd.grad(y, x, torch.randn(3, 6, 4), is_grads_batched=True)
        exact = normkit.make("pnv", 4)
        with normkit.kernels("reference"):
            torch.autograd.grad(exact(x), x, torch.randn(3, 6, 4), is_grads_batched=True)
    assert norm.skipped_grad == norm.window_g.abs().sum() == 0


def test_a_derived_norm_with_a_constructor_of_its_own_folds():
    class Clipped(normkit.norms.LayerNorm):
        def __init__(self, dim):
            super().__init__(dim, eps=0.5)
            self.most = 1.0

        def normalize(self, x, mask):
            return super().normalize(x.clamp(-self.most, self.most), mask)

    norm = Clipped(4).eval()
    nn.init.uniform_(norm.weight)
    model = nn.Sequential(norm, nn.Linear(4, 2)).eval()
    folded, report = normkit.fold(model, x := torch.randn(3, 4))
    assert report.count("gain folded") == 1
    assert folded[0].weight is None
    torch.testing.assert_close(folded(x), model(x))
