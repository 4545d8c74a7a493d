"""Tools that recognise norms by their class treat a converted model as the original."""

import copy

import pytest
import torch
from third_party_models import case_of
from torch import nn
from torch.optim.swa_utils import update_bn

import normkit as nk
from normkit.norms import NORMS, StatNorm

SPECS = ["layer", "dyt", "un", "power"]


@pytest.mark.parametrize(("name", "spec"), [("gpt2", "dyt"), ("gpt2", "un"), ("llama", "layer"), ("llama", "power")])
def test_trainer_decays_the_same_parameters_as_before_conversion(name, spec):
    trainer = pytest.importorskip("transformers").Trainer
    case = case_of(name)
    before = trainer.get_decay_parameter_names(None, case.model)
    assert before
    converted = nk.convert(case.model, spec)
    new = {key for key, _ in converted.named_parameters()} - {key for key, _ in case.model.named_parameters()}
    assert set(trainer.get_decay_parameter_names(None, converted)) == set(before) - new
    assert spec != "dyt" or any(key.endswith(".a") for key in new)


@pytest.mark.parametrize("spec", [*SPECS, "batch"])
@pytest.mark.parametrize("name", ["torchvision_vit", "hf_resnet"])
def test_torchvision_splits_the_same_parameters_as_before_conversion(name, spec):
    utils = pytest.importorskip("torchvision.ops._utils")
    case = case_of(name)
    norms, others = utils.split_normalization_params(case.model)
    model = nk.convert(case.model, spec)
    converted, same = utils.split_normalization_params(model)
    of_norms = {id(p) for m in model.modules() if isinstance(m, nk.Norm) for p in m.parameters()}
    assert {id(p) for p in converted} == of_norms
    assert len(same) == len(others)
    assert len(converted) >= len(norms) - (spec in ("un", "power"))


def stages():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def buffers(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def moved(model, before):
    return [name for name, b in model.named_buffers() if not torch.equal(b, before[name])]


def step(model):
    model.train()
    x = torch.randn(5, 3, 9, 9, requires_grad=True)
    model(x).square().sum().backward()
    return x.grad


STATEFUL = [name for name, kind in NORMS.items() if issubclass(kind, StatNorm)]


@pytest.mark.parametrize("spec", STATEFUL)
def test_lightning_freezes_statistics_and_lets_them_go(spec):
    tool = pytest.importorskip("lightning.pytorch.callbacks").BaseFinetuning
    model = nk.convert(stages(), spec)
    step(model)
    tool.freeze(model, train_bn=False)
    before = buffers(model)
    for each in (model, copy.deepcopy(model)):
        assert step(each).isfinite().all()
        assert moved(each, before) == []
    assert not any(p.requires_grad for p in model.parameters())
    tool.make_trainable(model)
    step(model)
    step(model)
    assert any(name.endswith("running") for name in moved(model, before))
    tool.freeze(model, train_bn=True)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        name for name, _ in model.named_parameters() if name.startswith(("1.", "4."))
    ]


def test_a_frozen_batch_norm_computes_what_pytorchs_does():
    tool = pytest.importorskip("lightning.pytorch.callbacks").BaseFinetuning
    theirs = stages()
    ours = nk.convert(theirs, "batch")
    for model in (theirs, ours):
        tool.freeze(model, train_bn=False)
        model.train()
    x = torch.randn(5, 3, 9, 9)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    theirs.eval(), ours.eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_lightning_averages_weights_of_a_converted_model():
    tool = pytest.importorskip("lightning.pytorch.callbacks").StochasticWeightAveraging
    model = nk.convert(stages(), "batch")
    model.device = torch.device("cpu")
    step(model)
    swa = tool(0.1)
    swa.reset_batch_norm_and_save_state(model)
    assert model[1].step == 0
    torch.testing.assert_close(model[1].running, torch.tensor([[0.0], [1.0]]).expand(2, 4))
    swa.reset_momenta()
    step(model)
    assert model[1].step == 1


def test_tools_that_would_replace_a_norm_or_its_statistics_are_refused():
    model = nk.convert(stages(), "un")
    step(model)
    before = buffers(model)
    with pytest.raises(AttributeError, match="num_features"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(TypeError, match="calibrate"):
        update_bn([torch.randn(5, 3, 9, 9)], model)
    assert moved(model, before) == []
