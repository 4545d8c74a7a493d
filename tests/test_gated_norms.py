"""Norms with a gate, as in Mamba 2 and Qwen3-Next, are taken apart."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit.models.convert import find
from normkit.models.masks import fit
from normkit.models.take_apart import GatedNorm

DIM, HEADS = 8, 3


class MyRMSNormGated(nn.Module):
    """A gate on the input, as in Mamba 2, or on the output, as in Qwen3-Next and Kimi Linear."""

    def __init__(self, gates_input: bool = True, activation=F.silu, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)
        self.variance_epsilon, self.gates_input, self.activation = 1e-3, gates_input, activation
        self.group_size = DIM // groups

    def forward(self, x, gate):
        factor = self.activation(gate.float())
        y = x.float() * factor if self.gates_input else x.float()
        y = y.unflatten(-1, (-1, self.group_size))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)
        y = self.weight * y.flatten(-2)
        return (y if self.gates_input else y * factor).to(x.dtype)


class OnGpu(nn.Module):
    """A norm whose weight is on a GPU, as far as one can tell."""

    def parameters(self, recurse: bool = True):
        return iter([SimpleNamespace(is_cuda=True)])


class Mixer(nn.Module):
    """Heads are normalized in rows, as in Qwen3-Next."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(DIM, 2 * HEADS * DIM), norm, nn.Linear(HEADS * DIM, DIM)

    def forward(self, x, real=None):
        y, gate = self.into(x).view(-1, 2, DIM).unbind(1)
        return self.out(self.norm(y, gate).view(*x.shape[:-1], -1))


KINDS = [(True, F.silu, 1), (False, F.silu, 1), (False, torch.sigmoid, 1), (True, F.silu, 2)]


@pytest.mark.parametrize(("gates_input", "activation", "groups"), KINDS)
def test_a_norm_with_a_gate_is_converted_alone_and_folds(gates_input, activation, groups):
    torch.manual_seed(0)
    model, x = Mixer(MyRMSNormGated(gates_input, activation, groups)).eval(), torch.randn(2, 5, DIM)
    assert list(find(model)) == ["norm"]
    same = nk.convert(model, "rms")
    assert isinstance(same.norm, GatedNorm)
    torch.testing.assert_close(same(x), model(x))
    gain, half = nk.fold(model, x)[0].bfloat16(), x.bfloat16()
    torch.testing.assert_close(same.bfloat16()(half), gain(half), rtol=0.1, atol=0.05)
    new = nk.convert(model, "un").train()
    new(torch.randn(4, 5, DIM)).sum().backward()
    folded, report = nk.fold(new.eval(), x)
    assert report.foldable == "1 of 1", str(report)
    assert report.max_error < 1e-12
    assert type(folded.norm.norm) is nn.Identity
    fitted = nk.calibrate(nk.convert(model, "un"), [torch.randn(50, 5, DIM)], like=model)
    assert (fitted(x) - model(x)).square().mean() < 0.5 * model(x).var()


def test_masks_reach_heads_in_rows():
    model = nk.convert(Mixer(MyRMSNormGated(gates_input=False)), "un(warmup=0)", mask_from="real").train()
    x, real = torch.randn(2, 5, DIM), torch.arange(5) < torch.tensor([[5], [2]])
    model(x, real=real)
    mine = model.norm.norm.running.clone()
    model.norm.norm.reset_parameters()
    rows = x[real][None]
    model(rows, real=torch.ones(rows.shape[:2], dtype=torch.bool))
    torch.testing.assert_close(mine, model.norm.norm.running)


def test_the_weight_can_be_read_where_no_kernel_takes_it():
    model = nk.convert(Mixer(MyRMSNormGated()), "un")
    assert model.norm.weight is model.norm.norm.weight
    assert model.norm.variance_epsilon == 1e-3
    assert nk.fold(model.eval(), torch.randn(2, 5, DIM))[0].norm.weight is None
    with pytest.raises(RuntimeError, match="use_cache"):
        GatedNorm.weight.fget(SimpleNamespace(norm=OnGpu(), training=True))


def test_a_mask_of_an_empty_batch_fits_rows():
    assert fit(torch.ones(0, 5, dtype=torch.bool), torch.Size([0]), time_first=False).shape == (0,)


def test_scale_loss_measures_what_norms_read():
    model, x = Mixer(MyRMSNormGated()), torch.randn(2, 5, DIM)
    with pytest.raises(ValueError, match="model"), nk.scale_loss(model):
        pass
    new = nk.convert(model, "un")
    with nk.scale_loss(new) as scales:
        new(x)
        y, gate = new.into(x).view(-1, 2, DIM).unbind(1)
        after = scales()
    alone = nn.Sequential(nk.RMSNorm(DIM))
    with nk.scale_loss(alone) as scales:
        alone(y * F.silu(gate))
        torch.testing.assert_close(after, scales())


def test_an_unknown_activation_cannot_be_read():
    with pytest.raises(ValueError, match="MyRMSNormGated"):
        nk.convert(Mixer(MyRMSNormGated(activation=torch.tanh)), "un")
