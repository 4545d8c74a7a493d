"""Masks reach every norm of a converted model, so padding changes nothing."""

import copy
import pickle
import warnings

import pytest
import torch
from small_models import built
from third_party_models import FAMILIES, case_of, missing, padding, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from normkit import diagnose, record
from normkit.models import convert
from normkit.models.masks import real_tokens
from normkit.norms import StatNorm

REAL = padding().bool()
MASKED = [name for name in FAMILIES if not missing(name) and name.split("_")[0] not in ("timm", "torchvision", "hf")]


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


@pytest.mark.parametrize("name", MASKED)
def test_padding_changes_neither_outputs_nor_statistics(name):
    case = case_of(name)
    torch.manual_seed(0)
    model = convert(case.model, "un(warmup=1)", mask_from=case.mask_from).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    other = copy.deepcopy(model)
    args, changes, real = change_padding(case)
    first = run(case, model)
    second = run(case._replace(args=args), other, **changes)
    torch.testing.assert_close(second[real], first[real], rtol=1e-4, atol=1e-4)
    for name, before in statistics(model).items():
        torch.testing.assert_close(other.get_buffer(name), before, rtol=1e-4, atol=1e-5, msg=name)


def rerun():
    def forward(m, x, attention_mask=None, again=True):
        return checkpoint(m.block, x, use_reentrant=False) if again else m.block(x)

    return built(forward, block=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))


@pytest.mark.parametrize(("spec", "lengths"), [("un(warmup=1)", (7, 7)), ("pnv", (7, 5))])
def test_two_masked_forwards_before_one_backward_are_recomputed_with_their_own_masks(spec, lengths):
    """As contrastive losses do, which encode queries and passages by one model."""
    model = convert(rerun(), spec, mask_from="attention_mask").train()
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
    model = built(lambda m, x, attention_mask=None: m.norm(x), norm=nn.LayerNorm(4))
    model = convert(model, "batch(alpha=0.0)", mask_from="attention_mask").train()
    x = torch.randn(2, 7, 4)
    model(x, attention_mask=padding())
    torch.testing.assert_close(model.norm.running[0], x[REAL].mean(0))
    model(x)
    torch.testing.assert_close(model.norm.running[0], x.mean((0, 1)))
    model(x, attention_mask=padding())
    model.norm(x)  # a part that is called by itself
    torch.testing.assert_close(model.norm.running[0], x.mean((0, 1)))
    with pytest.raises(ValueError, match="x"):
        model(x[..., :2], attention_mask=padding())
    model.norm(2 * x)
    torch.testing.assert_close(model.norm.running[0], 2 * x.mean((0, 1)))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (padding(), "attention_mask"),
        (REAL.float(), "attention_mask"),
        (~REAL, "src_key_padding_mask"),
        (1 - REAL.float(), "src_key_padding_mask"),
        (~REAL, "~pad"),
        ((1 - REAL.float()) * -1e9, "src_key_padding_mask"),
        (torch.where(REAL, 0.0, -torch.inf), "attention_mask"),
        ((1 - REAL.float())[:, None, None, :] * -1e9, "attention_mask"),
        (REAL[:, None, None, :].expand(2, 3, 7, 7), "attention_mask"),
        (~REAL[:, None, :].expand(2, 7, 7), "key_padding_mask"),
        (torch.full((7, 7), -torch.inf).triu(1) + (1 - REAL.float())[:, None, :] * -1e9, "attention_mask"),
    ],
)
def test_every_way_to_write_a_mask_is_read(given, name):
    assert torch.equal(real_tokens(given, name), REAL)
    assert real_tokens(torch.zeros(2, 7)).all(), "nothing is added to any score"


def test_a_name_that_does_not_say_what_true_means_is_a_warning():
    model, x = built(lambda m, x, pad_mask=None: m.norm(x), norm=nn.LayerNorm(4)), torch.randn(2, 7, 4)
    for name, real in (("pad_mask", REAL), ("~pad_mask", ~REAL)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            converted = convert(model, "batch(alpha=0.0)", mask_from=name).train()
        assert ["~pad_mask" in str(each.message) for each in caught] == [True] * (name == "pad_mask")
        converted(x, pad_mask=REAL)
        torch.testing.assert_close(converted.norm.running[0], x[real].mean(0))


def test_wrong_sources_of_masks_are_named():
    model = flat()
    for wrong, error, named in (
        ("absent", ValueError, "src_key_padding_mask"), ({"other.*": "x"}, ValueError, "mask"),
        (3, TypeError, "mask_from"),
    ):  # fmt: skip
        with pytest.raises(error, match=named):
            convert(model, "un", mask_from=wrong, inplace=True)
        assert type(model.norm) is nn.LayerNorm
    with pytest.raises(ValueError, match="tokens"):
        real_tokens(torch.ones(3))


def test_a_norm_learns_the_layout_of_its_mask_where_the_lengths_differ():
    """A norm on `[batch, tokens, C]` before attention that takes `[tokens, batch, C]`."""

    def forward(m, x, padding_mask=None):
        h = m.norm(x).transpose(0, 1)
        return x + m.attention(h, h, h, key_padding_mask=padding_mask)[0].transpose(0, 1)

    model = built(forward, norm=nn.LayerNorm(8), attention=nn.MultiheadAttention(8, 2))
    model = convert(model, "pnv(alpha=0.0)", mask_from="padding_mask")
    for length in (6, 4):  # the second could be either way round
        x, padding = torch.randn(4, length, 8), torch.zeros(4, length, dtype=torch.bool)
        padding[:, -1], x[:, -1] = True, 1000.0
        model(x, padding_mask=padding)
        torch.testing.assert_close(model.norm.running[0], x[:, :-1].square().mean((0, 1)))


def flat():
    """Time first, with the axes of time and batch in one."""

    def forward(m, x, src_key_padding_mask=None):
        return m.norm(x.flatten(0, 1)).view(x.shape)

    return built(forward, attention=nn.MultiheadAttention(8, 2), norm=nn.LayerNorm(8))


def test_where_lengths_are_equal_the_layout_is_that_of_other_norms_or_a_warning():
    """A model with the batch first, which transposes for an attention that wants time first."""

    def forward(m, x, attention_mask=None):
        h = m.first(x).transpose(0, 1)
        x = x + m.attend(h, h, h)[0].transpose(0, 1)
        return m.second(x.flatten(0, 1)).view_as(x)

    def make(**own):
        model = built(forward, first=nn.LayerNorm(4), attend=nn.MultiheadAttention(4, 2), second=nn.LayerNorm(4), **own)
        return convert(model, "batch(alpha=0.0)", mask_from="attention_mask").train()

    square = torch.arange(5) < torch.tensor([5, 4, 3, 2, 1])[:, None]
    model, x = make(), torch.randn(5, 5, 4)
    with pytest.warns(UserWarning, match="batch_first"):
        model(x, attention_mask=square)
    model(torch.randn(2, 7, 4), attention_mask=padding())
    for each in (model, make(batch_first=True)):
        each(x, attention_mask=square)
        torch.testing.assert_close(each.first.running[0], x[square].mean(0))
    wide = convert(built(lambda m, x, attention_mask: m.norm(x), norm=nn.LayerNorm(4)), "batch(alpha=0.0)",
                   mask_from="attention_mask").train()  # fmt: skip
    for heads in (3, 7):  # [batch, heads, tokens], then with as many heads as tokens
        wide(x := torch.randn(2, heads, 7, 4), attention_mask=padding())
    torch.testing.assert_close(wide.norm.running[0], x.transpose(1, 2)[REAL].mean((0, 1)))


def test_flattened_tokens_of_a_model_with_time_first_keep_their_mask():
    x, padding = torch.randn(4, 2, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    x[padding.T] = 100.0
    model = convert(flat(), "un", mask_from="src_key_padding_mask")
    model(x, padding)
    torch.testing.assert_close(model.norm.running[0], 0.9 + 0.1 * x[~padding.T].square().mean(0))


# -- copies, wrappers and shared norms --------------------------------------------------------------------------------


class Tuned(nn.Module):
    """What PEFT puts around a layer: it trains a copy, and keeps the original beside it."""

    def __init__(self, layer):
        super().__init__()
        self.original_module, self.modules_to_save = layer, nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.original_module.requires_grad_(requires_grad=False)

    def forward(self, *args, **kwargs):
        return self.modules_to_save["default"](*args, **kwargs)


class Tuner(nn.Module):
    """What PEFT puts around a model, whose `forward` it calls without the model's hooks."""

    def __init__(self, model, *layers):
        super().__init__()
        self.model = model
        for name in layers:
            model.set_submodule(name, Tuned(model.get_submodule(name)))

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(self.norm(x))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(4)

    def forward(self, x, attention_mask=None):
        return self.norm(self.blocks(x))


def batch_with_padding(length=7):
    x, mask = torch.randn(2, length, 4), padding(2, length).bool()
    return x, mask, torch.where(mask[..., None], x, 1e3)


def sees_padding(model, **kwargs):
    """Names of norms whose statistics depend on the content of padding."""
    x, mask, other = batch_with_padding()
    twin = copy.deepcopy(model)
    model(x, attention_mask=mask, **kwargs)
    twin(other, attention_mask=mask, **kwargs)
    seen = dict(twin.named_buffers())
    return [name for name, b in model.named_buffers() if name.endswith("running") and not torch.allclose(b, seen[name])]


def masked_blocks():
    torch.manual_seed(0)
    return convert(Blocks(), "batch(alpha=0.0)", mask_from="attention_mask").train()


def copied():
    model = masked_blocks()
    model.norm, model.blocks = copy.deepcopy(model.norm), copy.deepcopy(model.blocks)
    return copy.deepcopy(model)


def checkpointed():
    model = copied()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


BUILDS = {
    "tuned after": lambda: Tuner(masked_blocks(), "norm", "blocks.1"),
    "tuned before": lambda: convert(
        Tuner(Blocks(), "norm", "blocks.1.norm"), "batch(alpha=0.0)", mask_from={"*": "attention_mask"}
    ).train(),
    "pickled": lambda: pickle.loads(pickle.dumps(copied())),
    "data parallel": lambda: nn.DataParallel(copied()),
    "checkpointed": checkpointed,
}


@pytest.mark.parametrize("build", BUILDS)
def test_masks_follow_the_call_and_not_the_object(build):
    model = BUILDS[build]()
    assert sees_padding(model) == []
    with record(model, every=1, quantities=["padding"]) as rows:
        x, mask, _ = batch_with_padding()
        model(x, attention_mask=mask)
    assert {row.value for row in rows} <= {0.0}


def test_models_that_share_a_norm_give_it_their_own_masks():
    class Other(Block):
        def forward(self, x, real=None, attention_mask=None):
            return self.mix(self.norm(x))

    first, second = masked_blocks(), convert(Other(), "batch(alpha=0.0)", mask_from="real").train()
    second.norm = first.norm
    x, mask, other = batch_with_padding()
    for real in (mask, mask.flip(0)):
        second(torch.where(real[..., None], x, 1e3), real=real)
        torch.testing.assert_close(second.norm.running[0], x[real].mean(0))
    first(other, attention_mask=mask)
    assert first.norm.running.abs().max() < 100
    assert sees_padding(first) == []


# -- masks that the model changes -------------------------------------------------------------------------------------


class Changes(nn.Module):
    """A model that pads, subsamples or joins its input, and its mask."""

    def __init__(self, how):
        super().__init__()
        self.how, self.before, self.encoder = how, nn.LayerNorm(4), Encoder()

    def forward(self, x, attention_mask=None):
        attention_mask = self.change(attention_mask)
        return self.encoder(self.before(self.change(x)), attention_mask)

    def change(self, t):
        if self.how == "pad":
            return torch.cat([t, t.new_zeros(len(t), -t.shape[1] % 4, *t.shape[2:])], 1)
        return t[:, ::2] if self.how == "subsample" else torch.cat([t.new_ones(len(t), 3, *t.shape[2:]), t], 1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.block = nn.LayerNorm(4), Block()

    def forward(self, x, attention_mask):
        if attention_mask is not None:
            attention_mask = (1.0 - attention_mask[:, None, None].float()) * -1e9
        return self.block(self.norm(x))


@pytest.mark.parametrize("how", ["pad", "subsample", "join"])
def test_a_mask_that_the_model_changes_is_followed(how):
    torch.manual_seed(0)
    model = convert(Changes(how), "batch(alpha=0.0)", mask_from="attention_mask").train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sees_padding(model) == []
    x, mask, _ = batch_with_padding()
    model(x, mask)
    torch.testing.assert_close(model.before.running[0], model.change(x)[model.change(mask)].mean(0))


def pads(value=1.0):
    """A model that pads its input alone, and pools it."""

    def forward(m, x, real=None):
        return m.pooled(m.norm(nn.functional.pad(x, (0, 0, 0, 2), value=value))[:, 0])

    model = built(forward, norm=nn.LayerNorm(4), pooled=nn.LayerNorm(4))
    return convert(model, "batch(alpha=0.0)", mask_from="real").train()


def test_zeros_that_a_model_appends_are_padding():
    def time_first(m, x, src_key_padding_mask=None):
        return m.last(m.linear(m.norm(torch.cat([x, x.new_zeros(3, *x.shape[1:])]))))

    x, mask, _ = batch_with_padding()
    model = pads(0.0)
    turned = built(
        time_first, attend=nn.MultiheadAttention(4, 2),  # its batch_first is off
        norm=nn.LayerNorm(4), linear=nn.Linear(4, 4), last=nn.LayerNorm(4),
    )  # fmt: skip
    turned = convert(turned, "batch(alpha=0.0)", mask_from="src_key_padding_mask").train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, real=mask)
        turned(x.transpose(0, 1), src_key_padding_mask=~mask)
    for norm in (model.norm, turned.norm):
        torch.testing.assert_close(norm.running[0], x[mask].mean(0))
    normalized = nn.functional.batch_norm(x[mask], None, None, training=True)
    torch.testing.assert_close(turned.last.running[0], turned.linear(normalized).mean(0))  # no zeros, yet a known mask


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("compiles", [False, True])
def test_a_norm_that_no_mask_fits_is_named_with_both_lengths(compiles):
    model = pads()
    x, mask, _ = batch_with_padding()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    with pytest.warns(UserWarning, match=r"\bnorm\. real .*\b7\b.*\b9\b") as seen:
        run(x, real=mask)
    assert "pooled" not in str(seen[0].message)
    with warnings.catch_warnings():  # once, and not in a later step without a mask, nor at evaluation
        warnings.simplefilter("error")
        model(x, real=mask)
        model(x)
        model.eval()(x, real=mask)


def test_training_that_begins_without_a_mask_warns_once():
    model = convert(built(lambda m, x, real=None: m.norm(x), norm=nn.LayerNorm(4)), "un", mask_from="real")
    x = torch.randn(2, 7, 4)
    model.eval()(x)
    with pytest.warns(UserWarning, match="real"):
        model.train()(x)
    model(x)


def test_diagnose_names_the_mask_that_does_not_fit():
    model = pads()
    x, mask, _ = batch_with_padding()
    with record(model, every=1, quantities="default") as rows, pytest.warns(UserWarning, match="real"):
        model(x, real=mask)
    found = [finding for finding in diagnose(rows) if finding.kind == "padding"]
    assert [(finding.where, finding.evidence) for finding in found] == [(("norm",), {"norm": 7.0})]
    assert "9" in found[0].message


AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "conv_dim": (8, 8), "conv_kernel": (8, 2), "conv_stride": (4, 2), "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
         "mask_time_prob": 0.0}  # fmt: skip


class Pair(nn.Module):
    """Source and target beside each other, with masks of names of their own."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, src, tgt, src_padding_mask=None, tgt_padding_mask=None):
        return self.enc(src).mean() + self.dec(tgt).mean()


@pytest.mark.parametrize("length", [5, 6])
def test_the_mask_of_other_tokens_is_not_taken_whatever_their_length(length):
    with pytest.warns(UserWarning, match="tgt_padding_mask"):
        one = convert(Pair(), "un(warmup=0)", mask_from="src_padding_mask").train()
    rules = {"enc": "src_padding_mask", "dec": "tgt_padding_mask"}
    both = convert(Pair(), "un(warmup=0)", mask_from=rules).train()
    src, tgt = torch.randn(8, 6, 4), torch.randn(8, length, 4)
    masks = torch.zeros(8, 6, dtype=torch.bool), torch.zeros(8, length, dtype=torch.bool)
    masks[1][:, 2:] = True
    tgt[masks[1]] = 100.0
    both(src, tgt, *masks)
    assert both.dec.running.max() < 3
    if length == 5:
        with pytest.warns(UserWarning, match="length 6"):
            one(src, tgt, *masks)
    else:
        one(src, tgt, *masks)
    assert one.dec.running.max() > 100


def test_half_of_an_encoder_decoder_without_a_mask_is_a_warning():
    case = case_of("bart")
    model = convert(case.model, "un(warmup=0)", mask_from="attention_mask").train()
    given = {name: value for name, value in case.kwargs.items() if name != "decoder_attention_mask"}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    with pytest.warns(UserWarning, match="decoder_attention_mask"):
        model(**given)


def test_norms_of_transformers_follow_the_mask_that_their_model_derives():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**AUDIO))
    chosen = {"where": lambda site, _: "feature_extractor" not in site, "mask_from": "attention_mask"}
    model = convert(model, "batch", **chosen).train()
    real = {}

    def take(norm, args, kwargs):
        x, mask = args[0], kwargs.get("mask")
        if x.dim() == 3:
            real.setdefault(x.shape[1], []).append(None if mask is None else mask.sum(1).tolist())

    for norm in model.modules():
        if isinstance(norm, StatNorm):
            norm.register_forward_pre_hook(take, with_kwargs=True)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, 150:] = 0
    model(torch.randn(2, 300), attention_mask=mask)
    assert real == {37: [[37, 18]] * len(real[37])}
