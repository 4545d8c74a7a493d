"""Masks reach every norm of a converted model, so padding changes nothing."""

import copy

import pytest
import torch
from third_party_models import CASES, case_of, missing, padding, pixels, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from normkit.models import convert
from normkit.models.masks import real_tokens
from normkit.norms import StatNorm


def run(case, model=None, **changes):
    out = (case.model if model is None else model)(*case.args, **{**case.kwargs, **changes})
    return out if isinstance(out, torch.Tensor) else case.outputs(out)


MASKED = [name for name in CASES if not missing(name) and name.split("_")[0] not in ("timm", "torchvision", "hf")]


def statistics(model):
    return {name: t.clone() for name, t in model.named_buffers() if not torch.equal(t, t.new_zeros(()))}


def change_padding(case):
    """The same call with other content where there is padding, and which outputs are real."""
    if "input_ids" not in case.kwargs:
        x, mask = case.args[0].clone(), ~case.kwargs["src_key_padding_mask"]
        x[~mask] += 100
        return (x,), {}, mask
    ids = case.kwargs["input_ids"].clone()
    mask = case.kwargs["attention_mask"].bool()
    ids[~mask] = 7
    changes = {"input_ids": ids}
    if "decoder_input_ids" in case.kwargs:
        mask = case.kwargs["decoder_attention_mask"].bool()
        changes["decoder_input_ids"] = case.kwargs["decoder_input_ids"].masked_fill(~mask, 7)
    return case.args, changes, mask


@pytest.mark.parametrize("spec", ["batch", "un(warmup=1)"])
@pytest.mark.parametrize("name", MASKED)
def test_padding_changes_neither_outputs_nor_statistics(name, spec):
    case = case_of(name)
    torch.manual_seed(0)
    model = convert(case.model, spec, mask_from=case.mask_from).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    other = copy.deepcopy(model)
    args, changes, real = change_padding(case)
    first = run(case, model)
    case = case._replace(args=args)
    second = run(case, other, **changes)
    torch.testing.assert_close(second[real], first[real], rtol=1e-4, atol=1e-4)
    for name, before in statistics(model).items():
        torch.testing.assert_close(other.get_buffer(name), before, rtol=1e-4, atol=1e-5, msg=name)


def test_without_a_mask_padding_does_change_statistics():
    case = CASES["torch_encoder_pre"]()
    model = convert(case.model, "batch").train()
    other = copy.deepcopy(model)
    run(case, model)
    args, _, _ = change_padding(case)
    run(case._replace(args=args), other)
    assert not torch.allclose(model.norm.running, other.norm.running, rtol=1e-2)


class Rerun(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x, attention_mask=None, again=True):
        return checkpoint(self.block, x, use_reentrant=False) if again else self.block(x)


def test_masks_arrive_under_checkpointing():
    model = convert(Rerun(), "pnv", mask_from="attention_mask").train()
    other = copy.deepcopy(model)
    x, mask, dy = torch.randn(2, 7, 4), padding(), torch.randn(2, 7, 4)
    dy[~mask.bool()] = 0
    model(x, mask, again=True).backward(dy)
    other(x, attention_mask=mask, again=False).backward(dy)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    blind = copy.deepcopy(other)
    blind.zero_grad()
    blind(x, attention_mask=None, again=False).backward(dy)
    assert not torch.allclose(blind.block[0].weight.grad, other.block[0].weight.grad, rtol=1e-2)


@pytest.mark.parametrize("spec", ["un(warmup=1)", "power(groups=1)", "pnv"])
@pytest.mark.parametrize("lengths", [(7, 7), (7, 5)])
def test_two_masked_forwards_before_one_backward_are_recomputed_with_their_own_masks(spec, lengths):
    """As contrastive losses do, which encode queries and passages by one model."""
    model = convert(Rerun(), spec, mask_from="attention_mask").train()
    torch.manual_seed(0)
    passes = [
        (torch.randn(2, n, 4), torch.arange(n) < torch.tensor([[n], [real]]))
        for n, real in zip(lengths, (5, 2), strict=True)
    ]
    for _ in range(3):
        plain = copy.deepcopy(model)
        for each, again in ((model, True), (plain, False)):
            each.zero_grad()
            first, second = (each(x, mask, again=again)[mask] for x, mask in passes)
            (first.square().mean() * second.cos().mean()).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_a_mask_is_released_after_its_call():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x, attention_mask=None):
            return self.norm(x)

    model = convert(Masked(), "batch(alpha=0.0)", mask_from="attention_mask").train()
    x = torch.randn(2, 7, 4)
    model(x, attention_mask=padding())
    masked = model.norm.running.clone()
    torch.testing.assert_close(masked[0], x[padding().bool()].mean(0))
    model(x)
    torch.testing.assert_close(model.norm.running[0], x.mean((0, 1)))
    model(x, attention_mask=padding())
    model.norm(x)  # a part that is called by itself
    torch.testing.assert_close(model.norm.running[0], x.mean((0, 1)))
    with pytest.raises(ValueError, match="takes x"):
        model(x[..., :2], attention_mask=padding())
    model.norm(x)
    torch.testing.assert_close(model.norm.running[0], x.mean((0, 1)))


def test_a_time_first_model_gets_its_mask_turned():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    model = convert(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "batch(alpha=0.0)",
                    mask_from="src_key_padding_mask").train()  # fmt: skip
    x, mask = pixels(7, 2, 16), padding().bool()
    other = copy.deepcopy(model)
    model(x, src_key_padding_mask=~mask)
    changed = x.clone()
    changed[~mask.T] = 50.0
    other(changed, src_key_padding_mask=~mask)
    torch.testing.assert_close(model.layers[0].norm2.running, other.layers[0].norm2.running)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (padding(), "attention_mask"),
        (padding().bool(), "attention_mask"),
        (padding().float(), "attention_mask"),
        (~padding().bool(), "src_key_padding_mask"),
        ((1 - padding().float()) * -1e9, "src_key_padding_mask"),
        ((1 - padding().float())[:, None, None, :] * -1e9, "attention_mask"),
        (padding().bool()[:, None, None, :].expand(2, 3, 7, 7), "attention_mask"),
        (~padding().bool()[:, None, :].expand(2, 7, 7), "key_padding_mask"),
        (torch.full((7, 7), -torch.inf).triu(1) + (1 - padding().float())[:, None, :] * -1e9, "attention_mask"),
    ],
)
def test_every_way_to_write_a_mask_is_read(given, name):
    assert torch.equal(real_tokens(given, name), padding().bool())


def test_additive_mask_of_four_dimensions_reaches_norms():
    case = case_of("bert")
    two = convert(case.model, "batch", mask_from="attention_mask").eval()
    mask = padding()
    additive = (1 - mask.float())[:, None, None, :].expand(2, 1, 7, 7) * torch.finfo(torch.float32).min
    for norm in two.modules():
        norm.train(isinstance(norm, StatNorm))
    four = copy.deepcopy(two)
    two(case.kwargs["input_ids"], attention_mask=mask)
    four(case.kwargs["input_ids"], attention_mask=additive)
    for name, before in statistics(two).items():
        torch.testing.assert_close(four.get_buffer(name), before, msg=name)


def test_wrong_sources_of_masks_are_named():
    case = CASES["torch_encoder_pre"]()
    with pytest.raises(ValueError, match=r"no argument 'attention_mask'.*src_key_padding_mask"):
        convert(case.model, "un", mask_from="attention_mask")
    with pytest.raises(ValueError, match="no norm takes its mask"):
        convert(case.model, "un", mask_from={"encoder.*": "src_key_padding_mask"})
    with pytest.raises(TypeError, match="mask_from names an argument"):
        convert(case.model, "un", mask_from=3)
    with pytest.raises(ValueError, match="must be \\[batch, tokens\\]"):
        real_tokens(torch.ones(3))
    assert tokens(1, 2).shape == (1, 2)


class BatchFirst(nn.Module):
    """A norm on `[batch, tokens, C]` before attention that takes `[tokens, batch, C]`."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)

    def forward(self, x, padding_mask=None):
        h = self.norm(x).transpose(0, 1)
        return x + self.attention(h, h, h, key_padding_mask=padding_mask)[0].transpose(0, 1)


def test_a_norm_learns_the_layout_of_its_mask_where_the_lengths_differ():
    model = convert(BatchFirst(), "pnv(alpha=0.0)", mask_from="padding_mask")
    for length in (6, 4):  # the second could be either way round
        x, padding = torch.randn(4, length, 8), torch.zeros(4, length, dtype=torch.bool)
        padding[:, -1], x[:, -1] = True, 1000.0
        model(x, padding_mask=padding)
        torch.testing.assert_close(model.norm.running[0], x[:, :-1].square().mean((0, 1)))


class Flat(nn.Module):
    """Time first, with the axes of time and batch in one."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)

    def forward(self, x, src_key_padding_mask=None):
        return self.norm(x.flatten(0, 1)).view(x.shape)


def test_flattened_tokens_of_a_model_with_time_first_keep_their_mask():
    x, padding = torch.randn(4, 2, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    x[padding.T] = 100.0
    model = convert(Flat(), "un", mask_from="src_key_padding_mask")
    model(x, padding)
    torch.testing.assert_close(model.norm.running[0], 0.9 + 0.1 * x[~padding.T].square().mean(0))


@pytest.mark.parametrize("added", [0.0, -1e4, -torch.inf])
def test_numbers_that_are_added_to_scores(added):
    real = torch.tensor([[True, True, False], [True, True, True]]) | (added == 0)
    assert torch.equal(real_tokens(torch.where(real, 0.0, added)), real)
    assert torch.equal(real_tokens(real.float()), real)


def test_a_wrong_mask_leaves_the_model_as_it_was():
    model = Flat()
    for wrong, message in (("absent", "no argument 'absent'"), ({"other.*": "x"}, "no norm takes its mask from x")):
        with pytest.raises(ValueError, match=message):
            convert(model, "un", mask_from=wrong, inplace=True)
        assert type(model.norm) is nn.LayerNorm
