"""Statistics from data: exact, of real tokens only; offline norms fitted to those that they replaced."""

import copy
import re
import threading
import weakref

import pytest
import torch
from small_models import BatchNormAct2d, built
from third_party_models import CASES, case_of, padding, randomize
from torch import nn

from normkit.fold import fold
from normkit.models import calibrate, convert
from normkit.models.invoke import describe
from normkit.norms import NORMS, StatNorm, make

STAT = [name for name, kind in NORMS.items() if issubclass(kind, StatNorm)]


def rows(*sizes, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.5, 3, dim)
    return [torch.randn(n, dim, generator=generator) * spread + 5 for n in sizes]


@pytest.mark.parametrize("name", STAT)
def test_statistics_are_those_of_all_rows_together(name):
    batches = rows(3, 50, 8)
    spec = "power(groups=2)" if name == "power" else name
    model = nn.Sequential(make(spec, 6))
    norm = calibrate(model, batches)[0]
    x = torch.cat(batches).double()
    if name == "power":
        x = (x.view(-1, 2, 3) / (x.view(-1, 2, 3).square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(-1, 6)
    expected = torch.stack([x.mean(0), x.var(0, correction=0)]) if norm.center else x.square().mean(0)[None]
    torch.testing.assert_close(norm.running, expected.float(), rtol=1e-6, atol=1e-6)
    assert norm.step == 0
    assert torch.equal(model[0].running[-1], torch.ones(6)), "the original is untouched"


def test_a_large_mean_keeps_the_variance_exact():
    batches = [batch.double() + 1e7 for batch in rows(40, 30)]
    norm = calibrate(nn.Sequential(make("batch", 6)).double(), batches)[0]
    torch.testing.assert_close(norm.running[1], torch.cat(batches).var(0, correction=0), rtol=1e-6, atol=0)


def chain(*specs):
    torch.manual_seed(0)
    layers = [part for spec in specs for part in (nn.Linear(6, 6), nn.Tanh(), make(spec, 6), nn.Dropout(0.5))]
    return randomize(nn.Sequential(*layers))


def test_one_pass_divides_each_batch_by_its_own_statistics():
    model = chain("batch", "batch").train()
    batches = rows(20, 30)
    done = calibrate(model, batches)
    inputs = []
    for batch in batches:  # by hand
        h = torch.tanh(model[0](batch))
        norm = model[2]
        z = (h - h.mean(0)) / (h.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
        inputs.append(torch.tanh(model[4](z)))
    x = torch.cat(inputs)
    torch.testing.assert_close(done[6].running, torch.stack([x.mean(0), x.var(0, correction=0)]), rtol=1e-4, atol=1e-5)
    assert done.training
    assert done[3].training


def test_masks_of_the_model_are_honoured():
    case = CASES["torch_encoder_pre"]()
    model = convert(case.model, "batch", mask_from="src_key_padding_mask")
    x, mask = case.args[0], padding().bool()
    changed = torch.where(mask[..., None], x, 77.0)
    first = calibrate(model, [((x), ~mask)], forward=lambda m, b: m(b[0], src_key_padding_mask=b[1]))
    second = calibrate(model, [{"src": changed, "src_key_padding_mask": ~mask}])
    for name, buffer in first.named_buffers():
        torch.testing.assert_close(second.get_buffer(name), buffer, msg=name)
    real = x[mask]
    torch.testing.assert_close(first.layers[0].norm1.running[0], real.mean(0))


def test_modes_are_restored():
    model = chain("un").train()
    model[1].eval()
    done = calibrate(model, rows(3, 4))
    assert done.training
    assert not done[1].training
    assert calibrate(model, rows(3), inplace=True) is model


def test_bad_input_is_named_and_leaves_the_model_alone():
    with pytest.raises(ValueError, match="norm"):
        calibrate(nn.Sequential(nn.LayerNorm(3)), rows(3))
    with pytest.raises(ValueError, match="no batches"):
        calibrate(chain("un"), [])
    with pytest.raises(ValueError, match="idle"):
        calibrate(built(lambda m, x: m.norm(x), norm=make("un", 6), idle=make("un", 6)), rows(3))


@pytest.mark.parametrize("batches", [torch.ones(5, 6), "train", {"x": torch.ones(5, 6)}, nn.Linear(2, 2)])
def test_one_batch_is_no_batches(batches):
    given = re.escape(describe(batches))
    for like in (None, chain("layer")):
        with pytest.raises(TypeError, match=given):
            calibrate(chain("un"), batches, like=like)
    with pytest.raises(ValueError, match="padding"):
        calibrate(make("un", 6), [(torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.bool))])
    model = nn.Sequential(make("un", 6))
    with pytest.raises(ValueError, match="finite"):
        calibrate(model, [torch.full((3, 6), torch.nan)], inplace=True)
    assert torch.equal(model[0].running, torch.ones(1, 6))


def test_batches_with_labels_name_the_way_out():
    model = convert(nn.Sequential(nn.LayerNorm(4)), "un")
    batches = [(torch.randn(3, 4), torch.zeros(3))]
    with pytest.raises(TypeError, match=r"float32\[3, 4\]"):
        calibrate(model, batches)
    calibrate(model, batches, forward=lambda model, batch: model(batch[0]))


# -- fitted to the norms that they replace -----------------------------------------------------------------------------


DIM = 6


def model_of(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(count) for part in (nn.Linear(DIM, DIM), nn.Tanh(), nn.LayerNorm(DIM))]
    return randomize(nn.Sequential(*layers, nn.Linear(DIM, 3))).eval()


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(40 + 7 * n, DIM, generator=generator) + 0.3 for n in range(count)]


def outputs_and_inputs(model, name, data):
    """Return the real tokens that a module reads and returns."""
    rows, masks = [], []

    def keep(_, args, y):
        real = masks[-1] if masks[-1] is not None else torch.ones(y.shape[:-1])
        rows.append((args[0][real.bool()], y[real.bool()]))

    with model.get_submodule(name).register_forward_hook(keep), torch.no_grad():
        for batch in data:
            masks.append(batch.get("attention_mask"))
            model(**batch)
    return [torch.cat(each).double() for each in zip(*rows, strict=True)]


def fit_slowly(converted, original, data, order):
    """Fit norm after norm, each from forwards of its own, by a general solver."""
    model = copy.deepcopy(converted).eval()
    for name in order:
        norm = model.get_submodule(name)
        (x, _), (_, y) = outputs_and_inputs(model, name, data), outputs_and_inputs(original, name, data)
        mean = x.mean(0) if norm.center else 0 * x[0]
        norm.running.copy_(torch.stack([mean, x.var(0, correction=0)]) if norm.center else x.square().mean(0)[None])
        z = (x - mean) / (norm.running[-1].double() + norm.eps).sqrt()
        with torch.no_grad():
            for channel in range(norm.dim):
                columns = [z[:, channel]] + ([torch.ones_like(z[:, 0])] if norm.bias is not None else [])
                solved = torch.linalg.lstsq(torch.stack(columns, 1), y[:, [channel]]).solution[:, 0]
                norm.weight[channel] = solved[0]
                if norm.bias is not None:
                    norm.bias[channel] = solved[1]
    return model


def assert_same(model, other):
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("spec", ["un", "batch", "un(bias=False)", "batch(bias=False)", "repbn"])
def test_gain_and_bias_are_those_of_a_least_squares_solver_one_norm_after_the_other(spec):
    original, data = model_of(), batches()
    fitted = calibrate(convert(original, spec), data, like=original)
    x = torch.cat(data)
    for at in (2, 5):
        wanted, read = original[: at + 1](torch.cat(data)), fitted[:at](x)
        for channel in range(DIM):
            z = read[:, [channel]]
            if "bias=False" in spec:
                columns = z - fitted[at].running[0, channel] if fitted[at].center else z
            else:
                columns = torch.cat([z, torch.ones_like(z)], 1)
            solved = columns @ torch.linalg.lstsq(columns.double(), wanted[:, channel].double()).solution.float()
            torch.testing.assert_close(fitted[: at + 1](x)[:, channel], solved, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "spec"), [("bert", "batch"), ("gpt2", "un"), ("t5", "un(bias=False)")])
def test_batches_of_other_lengths_and_masks_give_what_norm_by_norm_gives(name, spec):
    case = case_of(name)
    original, given = case.model.eval(), case.kwargs
    masked = {} if name == "t5" else {"mask_from": "attention_mask"}
    data = []
    for length, left_out in ((5, 0), (4, 2), (3, 1)):
        batch = {key: value[:, :length] if value.dim() == 2 else value for key, value in given.items()}
        mask = torch.ones_like(batch["input_ids"])
        mask[0, length - left_out :] = 0
        data.append(batch | ({"attention_mask": mask} if masked else {}))
    calls = []
    converted = convert(original, spec, **masked)
    norms = {name for name, module in converted.named_modules() if hasattr(module, "running")}
    hooks = [
        converted.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name)) for name in norms
    ]
    converted(**data[0])
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(norms) > 2
    count = []
    with original.register_forward_hook(lambda *_: count.append(1)):
        fitted = calibrate(converted, data, like=original)
    assert len(count) == len(data) + 1, "each batch goes through the original once, the first one before"
    assert_same(fitted, fit_slowly(converted, original, data, calls))
    assert not [t for t in threading.enumerate() if t.name.startswith("normkit")]


def test_memory_holds_the_tensors_of_one_norm_alone():
    original, alive = model_of(20), []
    outputs = []
    for norm in original[2::3]:
        norm.register_forward_hook(lambda _, args, y: outputs.append(weakref.ref(y)))
        norm.register_forward_hook(lambda *_: alive.append(sum(each() is not None for each in outputs)))
    calibrate(convert(original, "un"), batches(3), like=original)
    assert len(outputs) > 2 * 20 * 3
    assert max(alive) <= 2 * 3 + 1, "each of two models holds one output a batch"


def test_a_norm_that_runs_twice_or_rests_gets_the_rows_of_all_its_calls():
    """Norms that run in another order than defined, one twice, one in long batches alone."""

    def forward(m, x):
        x = torch.tanh(m.layer(m.twice(m.first(x))))
        if len(x) > 50:
            x = m.long(x) + x.square()
        return m.last(torch.tanh(m.layer(m.twice(x))))

    norms = {name: nn.LayerNorm(DIM) for name in ("last", "twice", "long", "first")}
    original = randomize(built(forward, **norms, layer=nn.Linear(DIM, DIM))).eval()
    data = [{"x": each} for each in batches()[::-1]]
    assert len(data[0]["x"]) > 50 > len(data[-1]["x"])
    converted = convert(original, "batch")
    fitted = calibrate(converted, data, like=original)
    assert_same(fitted, fit_slowly(converted, original, data, ["first", "twice", "long", "last"]))
    fitted = calibrate(converted, data[::-1], like=original)  # the first batch does not show where `long` runs
    for name in ("first", "twice"):
        assert_same(fitted.get_submodule(name), calibrate(converted, data, like=original).get_submodule(name))
    x, (_, y) = outputs_and_inputs(fitted, "last", data)[0], outputs_and_inputs(original, "last", data)
    torch.testing.assert_close(fitted.last.running[0], x.mean(0).float(), rtol=0.1, atol=0.01)
    torch.testing.assert_close(fitted.last(x.float()).mean(0), y.mean(0).float(), rtol=0.1, atol=0.01)


def test_padding_layouts_and_activations_are_followed_and_the_error_falls():
    case = case_of("bert")
    original = case.model.eval()
    mask = torch.ones_like(case.kwargs["input_ids"])
    mask[:, -2:] = 0
    one = {**case.kwargs, "attention_mask": mask}
    other = {**one, "input_ids": torch.where(mask.bool(), one["input_ids"], 5)}
    converted = convert(original, "un", mask_from="attention_mask")
    assert_same(*(calibrate(converted, [batch], like=original) for batch in (one, other)))

    torch.manual_seed(0)
    for norm, spec in ((nn.BatchNorm2d(4), "pnv"), (BatchNormAct2d(4, lambda: nn.ReLU(inplace=True)), "batch")):
        picture = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))).eval()
        x = torch.randn(4, 3, 8, 8)
        fitted = calibrate(convert(picture, spec), [x], like=picture)
        torch.testing.assert_close(fitted(x), picture(x), rtol=1e-3, atol=1e-4)


def test_pytorchs_encoder_with_a_padding_mask_is_fitted_without_nested_tensors():
    layer = nn.TransformerEncoderLayer(DIM, 2, 8, 0.0, batch_first=True)
    model = randomize(nn.TransformerEncoder(layer, 2)).eval()
    x, padding = torch.randn(3, 7, DIM), torch.arange(7) >= torch.tensor([7, 5, 4])[:, None]
    converted = convert(model, "un", mask_from="src_key_padding_mask")
    fitted = calibrate(converted, [{"src": x, "src_key_padding_mask": padding}], like=model)
    assert all(module.running.isfinite().all() for module in fitted.modules() if hasattr(module, "running"))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_fitted_model_folds_and_the_given_models_stay():
    original, data = model_of().train(), batches()
    converted, seen = convert(original, "un"), []
    before = copy.deepcopy(converted.state_dict())
    fitted = calibrate(converted, data, like=original, on_progress=lambda *now: seen.append(now))
    assert seen == [(1, 2), (2, 2)]
    assert original.training
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    folded, report = fold(fitted.eval(), data[0])
    assert report.foldable == "2 of 2"
    torch.testing.assert_close(folded(data[0]), fitted(data[0]), rtol=1e-4, atol=1e-5)


def test_bad_input_raises_and_leaves_no_thread_and_the_norms_as_they_were():
    original, data = model_of(), batches(2)
    model = convert(original, "un")
    before = copy.deepcopy(model.state_dict())

    def broken(model, batch):
        model(batch)
        raise KeyError("mine")

    other = copy.deepcopy(original)
    other[5].weight.data[0] = float("nan")
    narrow = nn.Sequential(*original[:2], nn.Linear(DIM, 3), nn.LayerNorm(3), nn.Linear(3, DIM), *original[4:])
    for like, given, forward, error in (
        (original, [], None, "batches"),
        (nn.Sequential(nn.Linear(DIM, DIM)), data, None, "2, 5"),
        (other, data, None, "5"),
        (narrow, data, None, "2"),
        (original, data, broken, "mine"),
        (original, data, lambda model, batch: model[:3](batch), "5"),
    ):
        with pytest.raises((ValueError, KeyError), match=error):
            calibrate(model, given, like=like, forward=forward, inplace=True)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not [t for t in threading.enumerate() if t.name.startswith("normkit")]
    with pytest.raises(ValueError, match="norm"):
        calibrate(original, data, like=other)
    with pytest.raises(ValueError, match="like"):
        calibrate(model, data, like=model)
