"""Results that rounding could lose: long sums, large means, a share of the whole."""

import pytest
import torch
from norm_cases import DIM, SPECS, batch, random_norm, reads_its_sample
from torch.testing import assert_close

import normkit
from normkit.norms import make

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if list(random_norm(spec).parameters())])
def test_gradients_of_parameters_are_summed_in_float32(spec, choice, dtype):
    """In bfloat16 a long sum stops growing: PyTorch's LayerNorm loses 0.9 of the bias's."""
    norm, wide = random_norm(spec, dtype=torch.float32), random_norm(spec)
    x, dy = (batch(0, 4, 1024, DIM) * 2 + 1).to(dtype), batch(1, 4, 1024, DIM).abs().to(dtype)
    with normkit.kernels(choice):
        norm(x.requires_grad_()).backward(dy)
    wide(x.detach().double()).backward(dy.double())
    for got, expected in zip(norm.parameters(), wide.parameters(), strict=True):
        assert_close(got.grad.double(), expected.grad, rtol=2e-3, atol=2e-3 * expected.grad.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(DIM,), (3, DIM), (2, 3, DIM)])
@pytest.mark.parametrize("spec", ["layer", "rms(bias=True)", "scale(bias=True)"])
def test_per_token_norms_are_differentiated_twice_and_in_batches(spec, shape, dtype):
    found = {}
    for choice in ("auto", "reference"):
        norm, x = random_norm(spec, dtype=torch.float32), batch(0, *shape, dtype=dtype).requires_grad_()
        with normkit.kernels(choice):
            y = norm(x)
            (first,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
            twice = torch.autograd.grad(first.float().square().sum(), [x, *norm.parameters()], allow_unused=True)
            dys = torch.stack([torch.ones_like(y), y.detach()])
            together = torch.autograd.grad(norm(x), [x, *norm.parameters()], dys, is_grads_batched=True)
            y = norm(x)
            mapped = torch.vmap(lambda dy, y=y, x=x: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)
        found[choice] = [t for t in (*twice, *together, mapped) if t is not None]
    loose = {} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.3}
    for got, expected in zip(found["auto"], found["reference"], strict=True):
        assert_close(got, expected, **loose)


@pytest.mark.parametrize("spec", ["layer", "rms(bias=True)", "scale(bias=True)"])
def test_a_bias_alone_can_be_differentiated_with_a_graph(spec):
    norm = make(spec, DIM)
    norm.weight.requires_grad_(False)
    dy = batch(1, 3, DIM, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(norm(batch(0, 3, DIM, dtype=torch.bfloat16)), norm.bias, dy, create_graph=True)
    assert_close(found, dy.float().sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_variance_beside_a_large_mean_survives_joining(parts, mean):
    """By one process that synchronizes, and by several batches of one optimizer step."""
    norm, x = make("batch(alpha=0, sync=True)", DIM), batch(0, 4096, DIM, dtype=torch.float32) + mean
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    if parts > 1:
        normkit.follow_optimizer(norm, optimizer)
    for rows in x.chunk(parts):
        norm(rows)
    optimizer.step()
    assert_close(norm.running[1].double(), x.double().var(0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("spec", ["batch(alpha=0)", "pnv(alpha=0)", "un(alpha=0)", "mabn(alpha=0)", "renorm(alpha=0)"])
def test_a_share_of_zero_forgets_large_values(spec, choice):
    norm = make(spec, 2)
    with normkit.kernels(choice):
        norm(batch(0, 512, 2, dtype=torch.float32) * 1000)
        x = batch(1, 512, 2, dtype=torch.float32) * torch.tensor([1e-1, 1e-2])
        norm(x)
    expected = x.var(0) if norm.center else x.square().mean(0)
    assert_close(norm.running[-1], expected, rtol=2e-3, atol=1e-6 if spec.startswith("renorm") else 0)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if reads_its_sample(spec)] + ["instance"])
def test_a_sample_of_padding_alone_stays_small(spec):
    x = batch(0, 2, 3, DIM, dtype=torch.float32) * 300
    mask = torch.tensor([[True] * 3, [False] * 3])
    y = make(spec, DIM)(x, mask)
    assert y.abs().max() <= x.abs().max()
