"""Inputs of any strides, and jagged batches."""

import copy

import pytest
import torch
from norm_cases import DIM, SPECS, batch, random_norm
from small_models import built
from torch import nn
from torch.testing import assert_close

import normkit

# -- strides -----------------------------------------------------------------------------------------------------------

LAYOUTS = {  # how a contiguous tensor becomes one of another order in memory, with channels last
    "rows": lambda x: x,
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.movedim(-1, 1).contiguous().movedim(1, -1),
    "backwards": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


def order_of(x):
    """Strides of all axes longer than 1, and the memory format that PyTorch takes a batch of images for."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return strides, torch._prims_common.suggest_memory_format(x.movedim(-1, 1))


SIZES = [(2, 3, 4, DIM), (1, 3, 4, DIM), (3, 1, 1, DIM)]  # small images, one of them, and single pixels


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_output_and_gradient_have_the_strides_of_the_input(spec, choice):
    norm, plain = random_norm(spec, dtype=torch.float32), random_norm(spec, dtype=torch.float32)
    for turn, (shape, layout) in enumerate((s, v) for s in SIZES for v in LAYOUTS.values()):
        x, dy = (batch(seed + turn, *shape, dtype=torch.float32) for seed in (0, 50))
        results = []
        for each, given in ((plain, x.clone()), (norm, layout(x).detach())):
            leaf = given.requires_grad_()
            with normkit.kernels(choice):
                inner = leaf * 1  # a leaf's gradient would get the strides of the leaf in any case
                seen = []
                inner.register_hook(lambda grad, seen=seen: seen.append(order_of(grad)))
                y = each(inner)
                assert order_of(y) == order_of(inner), (shape, "training")
                y.backward(dy)
            assert seen == [order_of(inner)] or y is inner, (shape, "gradient")  # the identity passes dy on
            for grad_mode in (True, False):
                with normkit.kernels(choice), torch.set_grad_enabled(grad_mode):
                    inferred = copy.deepcopy(each).eval()(given)
                assert order_of(inferred) == order_of(given), (shape, "evaluation")
            results.append((y.detach(), leaf.grad, *each.state_dict().values()))
        assert_close(*results)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "old", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.SyncBatchNorm(8)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_converted_network_of_images_keeps_its_memory_format(old, form, training):
    """Its head calls `view`."""

    def forward(m, x):
        h = m.norm(m.conv(x))
        g = m.after(h)
        view = g.view(len(x), -1) if g.is_contiguous() else g.flatten(1)
        return m.head(view), h, g

    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=form)
    for spec in ("layer", "rms", "un", "batch", "power(groups=2)", "instance"):
        layers = {"after": nn.Conv2d(8, 8, 3, padding=1), "head": nn.Linear(8 * 20, 2)}
        model = built(forward, conv=nn.Conv2d(3, 8, 3, padding=1), norm=copy.deepcopy(old), **layers)
        model = normkit.convert(model.train(training).to(memory_format=form), spec)
        logits, *inner = model(x)
        assert all(t.is_contiguous(memory_format=form) for t in inner), spec
        logits.sum().backward()


@pytest.mark.parametrize("old", [nn.LayerNorm(8), nn.RMSNorm(8)], ids=lambda m: type(m).__name__)
def test_where_pytorch_makes_rows_contiguous_so_does_what_takes_its_place(old):
    x = torch.randn(2, 8, 5).transpose(1, 2)  # as of a patch embedding: `.flatten(2).transpose(1, 2)`
    for spec in ("layer", "rms", "un", "dyt"):
        model = normkit.convert(nn.Sequential(copy.deepcopy(old)), spec)
        for each in (model, copy.deepcopy(model), normkit.convert(model, "scale")):
            assert each(x).view(10, 8).shape == (10, 8)
    assert normkit.make("layer", 8)(x).stride() == x.stride()


# -- jagged batches ----------------------------------------------------------------------------------------------------

LENGTHS = (3, 5, 1)


def jagged(*trailing, seed=0):
    """A jagged batch, and the same rows padded with large numbers, with its mask."""
    values = batch(seed, sum(LENGTHS), *trailing)
    x = torch.nested.nested_tensor(list(values.split(LENGTHS)), layout=torch.jagged)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.full((len(LENGTHS), max(LENGTHS), *trailing), 7.0, dtype=values.dtype)
    padded[mask] = values
    return x, padded, mask


@pytest.mark.parametrize("spec", SPECS)
def test_a_jagged_batch_is_its_real_tokens(spec):
    norm, same = random_norm(spec), random_norm(spec)
    for turn in range(3):
        x, padded, mask = jagged(DIM, seed=turn)
        x, padded = x.detach().requires_grad_(), padded.requires_grad_()
        norm.zero_grad(), same.zero_grad()
        y, expected = norm(x), same(padded, mask)
        assert y.shape == x.shape
        assert y.offsets() is x.offsets()
        assert_close((x + y).values(), (padded + expected)[mask])
        weights = batch(90 + turn, sum(LENGTHS), DIM)
        (y.values() * weights).sum().backward()
        (expected[mask] * weights).sum().backward()
        assert_close(x.grad.values(), padded.grad[mask])
        for (name, p), (_, q) in zip(norm.named_parameters(), same.named_parameters(), strict=True):
            assert_close(p.grad, q.grad, msg=name)
        assert_close(dict(norm.named_buffers()), dict(same.named_buffers()))
    x, padded, mask = jagged(DIM, seed=9)
    assert_close(norm.eval()(x).values(), same.eval()(padded, mask)[mask])


@pytest.mark.parametrize("spec", ["rms", "un(window=2, warmup=2)"])
def test_heads_of_a_jagged_batch(spec):
    x, _, _ = jagged(2, DIM)
    same = random_norm(spec)(x.values())
    heads = x.transpose(1, 2)  # [batch, heads, jagged, channels]
    y = random_norm(spec)(heads)
    assert y.shape == heads.shape
    assert_close(y.transpose(1, 2).values(), same)


def test_rows_of_a_jagged_batch_that_belong_to_no_sample_move_no_statistic():
    values, offsets, lengths = batch(0, 9, DIM), torch.tensor([0, 4, 9]), torch.tensor([2, 3])
    real = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 0]).bool()
    values[~real] = 1e6
    x = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    norm, same = random_norm("batch"), random_norm("batch")
    y, expected = norm(x), same(values[real])
    assert_close(torch.cat(list(y.unbind())), expected)
    assert_close(norm.running, same.running)


def test_masks_and_sizes_that_do_not_fit_a_jagged_batch_raise():
    x, _, mask = jagged(DIM)
    norm = random_norm("un")
    with pytest.raises(ValueError, match="mask"):
        norm(x, mask)
    with pytest.raises(ValueError, match="dim"):
        random_norm("layer")(jagged(DIM + 1)[0])
    with pytest.warns(UserWarning, match="prototype"), pytest.raises(TypeError, match="jagged"):
        norm(torch.nested.nested_tensor([torch.ones(2, DIM), torch.ones(3, DIM)]))
    keep = torch.nested.nested_tensor_from_jagged(torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool(), x.offsets())
    same = random_norm("un")
    norm(x, keep), same(x.values(), keep.values())
    assert_close(norm.running, same.running)
