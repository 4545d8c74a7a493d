"""Masks reach every norm of a converted model, so padding changes nothing."""

import copy
import pickle
import warnings

import pytest
import torch
from third_party_models import CASES, SMALL, case_of, missing, padding, pixels, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from normkit import diagnose, record
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


# -- copies, wrappers and shared norms --------------------------------------------------------------------------------


class Tuned(nn.Module):
    """What PEFT puts around a layer: `modules_to_save` and LN tuning train a copy, and keep the original beside it."""

    def __init__(self, layer):
        super().__init__()
        self.original_module, self.modules_to_save = layer, nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.original_module.requires_grad_(requires_grad=False)

    def forward(self, *args, **kwargs):
        return self.modules_to_save["default"](*args, **kwargs)


class Tuner(nn.Module):
    """What PEFT puts around a model. It calls the model's `forward` itself, so that hooks of the model do not run."""

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


def masked_blocks(spec="batch(alpha=0.0)"):
    torch.manual_seed(0)
    return convert(Blocks(), spec, mask_from="attention_mask").train()


def tuned_after(spec):
    return Tuner(masked_blocks(spec), "norm", "blocks.1")


def tuned_before(spec):
    return convert(Tuner(Blocks(), "norm", "blocks.1.norm"), spec, mask_from={"*": "attention_mask"}).train()


def copied(spec):
    model = masked_blocks(spec)
    model.norm, model.blocks = copy.deepcopy(model.norm), copy.deepcopy(model.blocks)
    return copy.deepcopy(model)


def pickled(spec):
    return pickle.loads(pickle.dumps(copied(spec)))


def wrapped(spec):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = copied(spec)

        def forward(self, x, attention_mask):
            return self.backbone(x, attention_mask)

    return Whole()


def compiled(spec):
    return torch.compile(copied(spec), backend="aot_eager", fullgraph=True)


def data_parallel(spec):
    return nn.DataParallel(copied(spec))


def checkpointed(spec):
    model = copied(spec)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # inside torch.compile
@pytest.mark.parametrize("spec", ["batch(alpha=0.0)", "un(warmup=1)"])
@pytest.mark.parametrize(
    "build",
    [tuned_after, tuned_before, copied, pickled, wrapped, compiled, data_parallel, checkpointed],
    ids=lambda f: f.__name__,
)
def test_masks_follow_the_call_and_not_the_object(build, spec):
    model = build(spec)
    assert sees_padding(model) == []
    with record(model, every=1, quantities=["padding"]) as rows:
        x, mask, _ = batch_with_padding()
        model(x, attention_mask=mask)
    assert {row.value for row in rows} <= {0.0}


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_an_adapted_model_of_transformers_keeps_its_masks(name):
    case = case_of(name)
    model = convert(case.model, "batch(alpha=0.0)", mask_from=case.mask_from).eval()  # without dropout
    norms = [each for each, module in model.named_modules() if isinstance(module, StatNorm)]
    model = Tuner(model, norms[0], norms[-1])
    for module in model.modules():
        module.train(isinstance(module, StatNorm))
    args, changes, _ = change_padding(case)
    other = copy.deepcopy(model)
    run(case, model)
    run(case._replace(args=args), other, **changes)
    assert model.get_buffer(f"model.{norms[0]}.modules_to_save.default.step") == 1
    for name, before in statistics(model).items():
        torch.testing.assert_close(other.get_buffer(name), before, rtol=1e-4, atol=1e-5, msg=name)


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


def test_an_interrupted_forward_leaves_no_mask():
    class Stops(Blocks):
        def forward(self, x, attention_mask=None):
            if attention_mask is not None:
                raise KeyboardInterrupt
            return super().forward(x)

    model = convert(Stops(), "batch(alpha=0.0)", mask_from="attention_mask").train()
    x, mask, _ = batch_with_padding()
    with pytest.raises(KeyboardInterrupt):
        model(x, attention_mask=mask)
    model(x)
    torch.testing.assert_close(model.blocks[0].norm.running[0], x.mean((0, 1)))


# -- masks that the model changes -------------------------------------------------------------------------------------


class Changes(nn.Module):
    """A model that pads, subsamples, prolongs or joins its input, and its mask."""

    def __init__(self, how, derives=True):
        super().__init__()
        self.how, self.derives, self.before, self.encoder = how, derives, nn.LayerNorm(4), Encoder()

    def forward(self, x, attention_mask=None):
        given, attention_mask = attention_mask, self.change(attention_mask)
        h = self.before(self.change(x))
        return self.encoder(h, attention_mask if self.derives else given)

    def change(self, t):
        if self.how == "pad":
            return torch.cat([t, t.new_zeros(len(t), -t.shape[1] % 4, *t.shape[2:])], 1)
        if self.how == "subsample":
            return t[:, ::2]
        return torch.cat([t.new_ones(len(t), 3, *t.shape[2:]), t], 1)


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


class Pads(nn.Module):
    """A model that pads its input alone, and pools it."""

    def __init__(self, value=1.0):
        super().__init__()
        self.value, self.norm, self.pooled = value, nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x, real=None):
        h = self.norm(nn.functional.pad(x, (0, 0, 0, 2), value=self.value))
        return self.pooled(h[:, 0])


class PadsTimeFirst(nn.Module):
    """A model with time first that appends zeros to its input alone, and has norms before and after a layer."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2)  # its batch_first is off
        self.norm, self.linear, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, src_key_padding_mask=None):
        h = self.norm(torch.cat([x, x.new_zeros(3, *x.shape[1:])]))
        return self.last(self.linear(h))


def test_zeros_that_a_model_appends_are_padding():
    x, mask, _ = batch_with_padding()
    model = convert(Pads(0.0), "batch(alpha=0.0)", mask_from="real").train()
    turned = convert(PadsTimeFirst(), "batch(alpha=0.0)", mask_from="src_key_padding_mask").train()
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
    model = convert(Pads(), "batch", mask_from="real").train()
    x, mask, _ = batch_with_padding()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    with pytest.warns(UserWarning, match=r"\bnorm\. real .*\b7\b.*\b9\b") as seen:
        run(x, real=mask)
    assert "pooled" not in str(seen[0].message)
    with warnings.catch_warnings():  # once, and not without a mask, nor at evaluation
        warnings.simplefilter("error")
        model(x, real=mask)
        model(x)
        model.eval()(x, real=mask)


def test_diagnose_names_the_mask_that_does_not_fit():
    model = convert(Pads(), "batch", mask_from="real").train()
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
ONE = {**SMALL, "num_hidden_layers": 1}
PAIR = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
CANINE = {**ONE, "downsampling_rate": 4, "upsampling_kernel_size": 4, "num_hash_functions": 2, "num_hash_buckets": 256}
BIG_BIRD = {**ONE, "block_size": 16, "num_random_blocks": 1, "max_position_embeddings": 256}
LED = {**PAIR, "attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
LAYOUT = {**ONE, "input_size": 16, "patch_size": 8, "coordinate_size": 2, "shape_size": 4,
          "max_position_embeddings": 20, "max_2d_position_embeddings": 64}  # fmt: skip
VILT = {**ONE, "image_size": 16, "patch_size": 8, "max_position_embeddings": 20}
# model, its configuration, length of the mask; the lengths of norms' inputs and how many of them are real in the second
# sequence, whose first half is real
CHANGED = [
    ("Wav2Vec2", AUDIO, 300, {37: 18}),
    ("Wav2Vec2Conformer", AUDIO, 300, {37: 18}),
    ("Hubert", AUDIO, 300, {37: 18}),
    ("UniSpeech", AUDIO, 300, {37: 18}),
    ("Data2VecAudio", AUDIO, 300, {37: 18}),
    ("Speech2Text", {**PAIR, "conv_channels": 16, "input_feat_per_channel": 8}, 64, {16: 8, 5: 5}),
    ("Canine", CANINE, 128, {128: 64, 32: 16}),
    ("Longformer", {**ONE, "attention_window": 8, "max_position_embeddings": 64}, 37, {40: 18}),
    ("BigBird", {**BIG_BIRD, "attention_type": "block_sparse"}, 141, {144: 70}),
    ("LED", LED, 21, {24: 10, 5: 5}),
    ("VisualBert", {**ONE, "visual_embedding_dim": 12}, 9, {14: 4 + 3}),
    ("Vilt", VILT, 9, {9: 4, 14: 4 + 5}),
    ("LayoutLMv3", LAYOUT, 9, {9: 4, 14: 4 + 5}),
]


def other_inputs(name, length):
    ids = {"input_ids": tokens(2, length)}
    image = {**ids, "pixel_values": pixels(2, 3, 16, 16)}
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {
        "Speech2Text": {"input_features": torch.randn(2, length, 8), "decoder_input_ids": tokens(2, 5),
                        "decoder_attention_mask": torch.ones(2, 5)},
        "LED": {**ids, "decoder_input_ids": tokens(2, 5), "decoder_attention_mask": torch.ones(2, 5),
                "global_attention_mask": torch.eye(length, dtype=torch.long)[:1].repeat(2, 1)},
        "VisualBert": {**ids, "visual_embeds": torch.randn(2, 5, 12), "visual_attention_mask": seen},
        "Vilt": {**image, "pixel_mask": torch.ones(2, 16, 16, dtype=torch.long)},
        "LayoutLMv3": {**image, "bbox": torch.zeros(2, length, 4, dtype=torch.long)},
    }.get(name, {"input_values": torch.randn(2, length)} if length == 300 else ids)  # fmt: skip


@pytest.mark.parametrize(("name", "options", "length", "expected"), CHANGED, ids=lambda value: value)
@pytest.mark.filterwarnings("ignore:norms that train without a mask. norm")  # LayoutLMv3's norm of the image alone
def test_norms_of_transformers_follow_the_mask_that_their_model_derives(name, options, length, expected):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
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
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    model(attention_mask=mask, **other_inputs(name, length))
    if name == "LayoutLMv3":
        assert real.pop(5) == [None]
    first = {37: 37, 40: 37, 144: 141, 24: 21}
    assert real == {n: [[first.get(n, n), k]] * len(real[n]) for n, k in expected.items()}
