"""PyTorch's fused kernels against plain operations."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close

import normkit
from normkit.kernels import dispatch, fused, ops, reference

DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def fused_only():
    """Without the C++ kernels, as where there is no compiler."""
    with normkit.kernels("fused"):
        yield


@pytest.mark.parametrize("n", [1, fused.BLOCK, 5000])
def test_columns_over_blocks_of_rows(n):
    torch.manual_seed(0)
    x, dy, mean, inv = (torch.randn(*shape, **DOUBLE) for shape in ((n, 8), (n, 8), (8,), (8,)))
    moments = torch.stack([x.mean(0), x.var(0, correction=0)])
    assert_close(fused.moments(x, None, True, torch.float64)[0], moments, rtol=1e-12, atol=1e-13)
    sums = (dy.sum(0), (dy * (x - mean) * inv).sum(0))
    assert_close(fused.column_sums(dy, x, mean, inv), sums, rtol=1e-10, atol=1e-10)
    var = inv.square()
    z = (x - mean) / (var + 1e-3).sqrt()
    assert_close(fused.normalize(x, mean, var, inv, mean, 1e-3), z * inv + mean)
    assert_close(fused.normalize(x, None, var, None, None, 0.0), x / var.sqrt())
    if n > 1:
        wide = [t.clone().requires_grad_() for t in (x, mean)]
        inv = torch.rsqrt(x.var(0, correction=0) + 1e-3)
        expected = torch.nn.functional.batch_norm(wide[0], None, None, mean, None, True, 0.0, 1e-3)
        dx, got = fused.own_gradient(dy, x, x.mean(0), inv, mean)
        assert_close(dx, torch.autograd.grad(expected, wide[0], dy)[0])
        assert_close(torch.stack(got), torch.stack([dy.sum(0), (dy * (x - x.mean(0)) * inv).sum(0)]))


@pytest.mark.parametrize("center", [True, False])
def test_float_does_not_fade_over_many_rows(center):
    torch.manual_seed(0)
    x = torch.randn(100_000, 8) + 3
    assert_close(
        ops.moments(x, None, center)[0].double(),
        ops.moments(x.double(), None, center)[0],
        rtol=2e-6,
        atol=2e-6,
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spec", ["un", "batch", "power(groups=2)"])
def test_modes_of_pytorch_leave_nothing_in_a_cache(spec, training):
    norm, x = normkit.make(spec, 4).train(training), torch.randn(5000, 4)
    fused._constant.cache_clear()
    with torch.no_grad(), torch.device("meta"):
        norm(x), norm(x.bfloat16())
    fused._constant.cache_clear()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        norm.eval()(x)
    with torch.no_grad():
        assert type(norm(x)) is torch.Tensor
        assert norm(x).isfinite().all()


@pytest.mark.parametrize("half", dispatch.HALVES)
def test_halves_are_summed_in_float(half):
    torch.manual_seed(0)
    x = torch.randn(3000, 8).to(half)
    assert dispatch.can_join(x, torch.float32)
    stat, _ = ops.moments(x, None, True, torch.float32)
    assert stat.dtype is torch.float32
    assert_close(stat.double(), ops.moments(x.double(), None, True)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("op", "width"), [(ops.rms, 6), (ops.scale, 1)])
def test_rows_can_be_differentiated_twice(op, width):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, **DOUBLE, requires_grad=True) for shape in ((4, 6), (width,)))
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, None, 1e-5), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: op(x, w, None, 1e-5), (x, weight))


@pytest.mark.parametrize("half", dispatch.HALVES)
@pytest.mark.parametrize(
    ("op", "width"), [(ops.rms, 6), (ops.rms, 0), (ops.scale, 1), (ops.scale, 0), (ops.group_rms, 0)]
)
def test_rows_of_halves_are_rounded_once(op, width, half):
    torch.manual_seed(0)
    x, dy = torch.randn(5, 3, 6).to(half).requires_grad_(), torch.randn(5, 3, 6).to(half)
    weight = torch.rand(width, requires_grad=True) if width else None
    rest = (1e-5, 2) if op is ops.group_rms else (weight, None, 1e-5)
    found = []
    for choice in ("fused", "reference"):
        with normkit.kernels(choice) as ran:
            y = op(x, *rest)
            found.append((y, *torch.autograd.grad(y, [x, weight] if width else [x], dy)))
        assert next(iter(ran)).startswith(choice)
    assert [t.dtype for t in found[0]] == [half, half, torch.float32][: len(found[0])]
    for ours, plain in zip(*found, strict=True):
        unit = torch.finfo(half).eps * plain.detach().abs().float()
        assert ((ours - plain).abs().float() <= unit + 1e-5).all()  # a float apart, so at most one number of this type


def test_a_clamped_length_is_a_constant():
    x = torch.tensor([[3e-6, 4e-6], [3.0, 4.0]], **DOUBLE, requires_grad=True)
    ops.scale(x, None, None, 1e-5).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]], **DOUBLE))
    assert_close(x.grad, torch.tensor([[1e5, 2e5], [0.0, 0.0]], **DOUBLE))


@pytest.mark.parametrize("choice", ["fused", "auto", "reference"])
@pytest.mark.parametrize("op", [ops.scale, ops.rms])
def test_a_row_whose_squares_overflow_gets_no_gradient(op, choice):
    x, weight = torch.tensor([[1e30, -2e30], [3.0, 4.0]], requires_grad=True), torch.ones(1, requires_grad=True)
    with normkit.kernels(choice):
        op(x, weight if op is ops.scale else None, None, 1e-5).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert x.grad is not None
    assert x.grad[0].tolist() == [0.0, 0.0]
    assert x.grad[1].isfinite().all()
    assert weight.grad is None or weight.grad.item() == pytest.approx(5.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "spec", [*normkit.NORMS, "power(groups=0, warmup=1)", "renorm(warmup=0, r_until=1, d_until=1)"]
)
def test_norms_on_fused_kernels_equal_the_reference(spec, masked):
    mask = torch.tensor([[True] * 4, [True, True, False, False]]) if masked else None
    found = []
    for choice in ("reference", "fused"):
        torch.manual_seed(0)
        norm, seen = normkit.make(spec, 8).double(), []
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        for _ in range(3):
            x, dy = torch.randn(2, 4, 8, **DOUBLE).add_(0.5).requires_grad_(), torch.randn(2, 4, 8, **DOUBLE)
            with normkit.kernels(choice) as ran:
                norm.zero_grad()
                y = norm(x, mask)
                y.backward(dy)
            assert all(name.startswith("reference") for name in ran) or choice == "fused"
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in norm.parameters() if p.grad is not None)]
        found.append([*seen, *norm.buffers()])
    assert_close(found[0], found[1])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_of_bfloat16_with_float32_parameters(weighted, biased):
    torch.manual_seed(0)
    x, found = torch.randn(6, 8).bfloat16(), []
    for choice in ("auto", "reference"):
        leaf, weight = x.clone().requires_grad_(), torch.ones(8, requires_grad=True) if weighted else None
        bias = torch.ones(8, requires_grad=True) if biased else None
        with normkit.kernels(choice):
            y = ops.layer(leaf, weight, bias, 1e-5)
            y.float().pow(3).sum().backward()
        found.append([y.detach(), *(t.grad for t in (leaf, weight, bias) if t is not None)])
    assert_close(found[0], found[1], atol=0.05, rtol=0.02)


@pytest.mark.parametrize("half", dispatch.HALVES)
@pytest.mark.parametrize("choice", ["auto", "fused"])
def test_layer_norm_with_weight_and_bias_of_two_types(choice, half):
    x, weight, bias = torch.randn(6, 8).to(half), torch.randn(8), torch.randn(8)
    with torch.no_grad(), normkit.kernels(choice):
        for w, b in ((weight.to(half), bias), (weight, bias.to(half))):
            assert_close(ops.layer(x, w, b, 1e-5), reference.layer(x, w, b, 1e-5), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("choice", ["auto", "fused", "reference"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_padding_moves_no_state(kind, choice):
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    x, dy = torch.randn(3, 3, 8).to(kind), torch.randn(3, 3, 8).to(kind)
    found = []
    for padding in (0.0, float("nan")):
        norm = normkit.make("power(groups=0, warmup=1)", 8)
        with normkit.kernels(choice):
            for _ in range(3):
                leaf = torch.where(mask[..., None], x, padding).requires_grad_()
                norm(leaf, mask).backward(dy)
                assert leaf.grad is not None
                assert leaf.grad[mask].isfinite().all()
        found.append(dict(norm.named_buffers()))
    assert found[1]["skipped"] == found[1]["skipped_grad"] == 0
    assert_close(*found)


@pytest.mark.parametrize("center", [True, False])
def test_a_mask_that_leaves_nothing_or_everything(center):
    torch.manual_seed(0)
    x, dy, stat = torch.randn(6, 4).bfloat16(), torch.randn(6, 4).bfloat16(), torch.rand(1 + center, 4) + 0.5
    for mask in (torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)):
        batch, count = ops.moments(x, mask, center, torch.float32)
        assert (batch.shape, batch.dtype, int(count)) == ((1 + center, 4), torch.float32, int(mask.sum()))
        sums = ops.standardize_grad(dy, x, stat, 1e-5, center, mask=mask, real=True)[1]
        assert sums is not None
        assert sums.shape == (4, 4)
        assert_close(sums[2:], sums[:2] * mask[0])
    assert_close(batch, ops.moments(x, None, center, torch.float32)[0])


@pytest.mark.parametrize("spec", ["rms", "scale", "power(groups=2)", "layer"])
def test_norms_of_tokens_under_other_ways_to_differentiate(spec):
    """Twice, of a transposed input too; batched backward passes; forward mode."""
    norm, linear, x = normkit.make(spec, 4).eval(), torch.nn.Linear(4, 4), torch.randn(6, 3, 4)
    found = []
    for graph in (False, True):
        h = linear(x).transpose(0, 1)
        loss = (h + norm(h)).pow(3).sum()
        found += torch.autograd.grad(loss, linear.weight, create_graph=graph)
    assert_close(found[0], found[1])

    x = torch.randn(3, 4)
    jacobian = torch.autograd.functional.jacobian(norm, x)
    assert_close(torch.autograd.functional.jacobian(norm, x, vectorize=True), jacobian)
    tangent = torch.randn(3, 4)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, tangent)))
    assert_close(y.tangent, torch.einsum("abcd,cd->ab", jacobian, tangent))


@pytest.mark.parametrize("spec", ["layer", "rms", "scale", "dyt", "derf", "nonorm(affine=True)", "switchable", "un"])
def test_norms_of_a_bfloat16_model_are_rounded_once(spec):
    torch.manual_seed(0)
    norm, x = normkit.make(spec, 8).eval(), torch.randn(64, 8).bfloat16()
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    norm.bfloat16()
    differ = norm(x) != norm.double()(x.double()).bfloat16()
    assert differ.float().mean() < 0.01
