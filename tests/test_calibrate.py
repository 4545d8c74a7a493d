"""Statistics from data: exact, of real tokens only, whatever the batches look like."""

import copy
import re

import pytest
import torch
from third_party_models import CASES, case_of, padding, randomize
from torch import nn

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


def test_a_converted_bert_becomes_the_function_of_its_batch():
    case = case_of("bert")
    model = convert(case.model, "batch", mask_from="attention_mask")
    done = calibrate(model, [case.kwargs]).eval()
    once = copy.deepcopy(model).eval()
    for norm in once.modules():
        norm.train(isinstance(norm, StatNorm))
    with torch.no_grad():
        torch.testing.assert_close(done(**case.kwargs).logits, once(**case.kwargs).logits, rtol=1e-3, atol=1e-4)


def test_modes_are_restored():
    model = chain("un").train()
    model[1].eval()
    done = calibrate(model, rows(3, 4))
    assert done.training
    assert not done[1].training
    assert calibrate(model, rows(3), inplace=True) is model


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.idle = make("un", 6), make("un", 6)

    def forward(self, x):
        return self.norm(x)


def test_bad_input_is_named_and_leaves_the_model_alone():
    with pytest.raises(ValueError, match="no norm with running statistics"):
        calibrate(nn.Sequential(nn.LayerNorm(3)), rows(3))
    with pytest.raises(ValueError, match="no batches"):
        calibrate(chain("un"), [])
    with pytest.raises(ValueError, match="never ran, so they have no statistics: idle"):
        calibrate(Sometimes(), rows(3))


@pytest.mark.parametrize("batches", [torch.ones(5, 6), "train", {"x": torch.ones(5, 6)}, nn.Linear(2, 2)])
def test_one_batch_is_no_batches(batches):
    given = re.escape(describe(batches))
    for like in (None, chain("layer")):
        with pytest.raises(TypeError, match=rf"got one {given}\. Give a list of it, \[x\], or a loader"):
            calibrate(chain("un"), batches, like=like)
    with pytest.raises(ValueError, match="all its tokens were padding"):
        calibrate(make("un", 6), [(torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.bool))])
    model = nn.Sequential(make("un", 6))
    with pytest.raises(ValueError, match="for 0: its input was not finite"):
        calibrate(model, [torch.full((3, 6), torch.nan)], inplace=True)
    assert torch.equal(model[0].running, torch.ones(1, 6))


def test_batches_with_labels_name_the_way_out():
    model = convert(nn.Sequential(nn.LayerNorm(4)), "un")
    batches = [(torch.randn(3, 4), torch.zeros(3))]
    with pytest.raises(TypeError, match=r"given as \(float32\[3, 4\], float32\[3\]\); pick the inputs"):
        calibrate(model, batches)
    calibrate(model, batches, forward=lambda model, batch: model(batch[0]))
