"""Norms that are special cases of each other; padded and packed batches."""

import pytest
import torch
import torch.nn.functional as F
from norm_cases import DIM, STAT_SPECS, batch, random_norm, train_step, trained
from torch.testing import assert_close

from normkit.norms import GroupNorm, LayerNorm, RMSNorm, ScaleNorm


def test_windows_of_one_are_pnv():
    """UN and MABN with a window of one, and PN-V, without gradients on padding."""
    specs = ("pnv(alpha=0.9)", "un(window=1, warmup=3)", "mabn(window=1, warmup=3, alpha=0.9, renorm_after=1000)")
    norms = [random_norm(spec) for spec in specs]
    for step in range(12):
        x, dy = batch(step, 2, 5, DIM, scale=1 + 0.3 * step), batch(99 + step, 2, 5, DIM)
        mask = torch.arange(5) < torch.tensor([[5], [2 + step % 3]])
        dy[~mask] = 0
        first, *others = [train_step(norm, x, dy, mask) for norm in norms]
        for other in others:
            for name in ("y", "dx", "dweight", "dbias", "running"):
                assert_close(other[name], first[name], msg=lambda text, name=name, step=step: f"{step} {name}: {text}")


def test_biased_and_unbiased_batchnorm_differ_in_the_running_variance_alone():
    one, two = (train_step(random_norm(f"batch(running_var={how!r})"), batch(0, 6, DIM), batch(1, 6, DIM))
                for how in ("biased", "unbiased"))  # fmt: skip
    assert_close(one["dx"], two["dx"])
    assert_close((two["running"][1] - 0.9) / (one["running"][1] - 0.9), torch.full((DIM,), 6 / 5, dtype=torch.float64))


def test_batchnorm_is_torchs():
    norm = random_norm("batch(alpha=0.9)")
    mean, var = torch.zeros(DIM, dtype=torch.float64), torch.ones(DIM, dtype=torch.float64)
    for step in range(6):
        x, dy = batch(step, 7, DIM), batch(50 + step, 7, DIM)
        got = train_step(norm, x, dy)
        leaf = x.clone().requires_grad_()
        weight, bias = (p.detach().clone().requires_grad_() for p in (norm.weight, norm.bias))
        y = F.batch_norm(leaf, mean, var, weight, bias, training=True, momentum=0.1, eps=norm.eps)
        y.backward(dy)
        assert_close(got["y"], y.detach())
        assert_close(got["dx"], leaf.grad)
        assert_close(got["dweight"], weight.grad)
        assert_close(got["dbias"], bias.grad)
        assert_close(got["running"], torch.stack([mean, var]))


def test_groupnorm_of_one_group_is_layernorm_and_both_are_torchs():
    x = batch(0, 3, 5, DIM)
    layer, group = LayerNorm(DIM).double(), GroupNorm(DIM, groups=1).double()
    assert_close(group(x), layer(x))
    assert_close(layer(x), F.layer_norm(x, (DIM,)))
    four = GroupNorm(DIM, groups=4).double()
    assert_close(four(x).flatten(0, 1), F.group_norm(x.flatten(0, 1), 4))
    image = GroupNorm(DIM, groups=4, over="sample").double()
    assert_close(image(x).transpose(1, 2), F.group_norm(x.transpose(1, 2), 4))


def test_scalenorm_is_an_rmsnorm_with_one_gain():
    """TWT, section 4.2: ScaleNorm(g) = RMSNorm(weight = g / sqrt(d)), up to eps."""
    x, g = batch(0, 3, 5, DIM), 2.5
    scale, rms = ScaleNorm(DIM).double(), RMSNorm(DIM, eps=0.0).double()
    with torch.no_grad():
        scale.weight.fill_(g)
        rms.weight.fill_(g / DIM**0.5)
    assert_close(scale(x), rms(x))
    assert_close(RMSNorm(DIM).double()(x), F.rms_norm(x, (DIM,), eps=1e-5))


@pytest.mark.parametrize("spec", STAT_SPECS)
def test_packed_rows_equal_the_padded_batch_with_mask(spec):
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    for steps in (1, 5):
        x, dy = batch(0, 2, 4, DIM), batch(1, 2, 4, DIM)
        dy[~mask] = 0
        padded = train_step(trained(spec, steps), x, dy, mask)
        packed = train_step(trained(spec, steps), x[mask], dy[mask])
        for name, value in packed.items():
            got = padded[name][mask] if name in ("y", "dx") else padded[name]
            assert_close(got, value, msg=lambda text, name=name: f"{name}: {text}")


def test_power_in_its_warm_up_is_pnv():
    power, pnv = random_norm("power(groups=0, warmup=100)"), random_norm("pnv")
    for step in range(5):
        x, dy = batch(step, 6, DIM), batch(9 + step, 6, DIM)
        one, two = train_step(power, x, dy), train_step(pnv, x, dy)
        for name in ("y", "dx", "dweight", "dbias"):
            assert_close(one[name], two[name])
    seen = torch.stack([batch(step, 6, DIM).square().mean(0) for step in range(5)])
    assert_close(power.running[0], seen.mean(0))  # a plain average of all batches
