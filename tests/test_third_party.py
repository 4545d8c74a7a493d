"""Reading norms of third-party libraries where that takes more than an attribute."""

import pytest
import torch
from third_party_models import randomize
from torch import nn
from torchvision_stub import load_torchvision

from normkit.fold import fold
from normkit.models import blend, convert, find, unreadable
from normkit.norms import BatchNorm, make, parse


class GemmaRMSNorm(nn.Module):
    """As in transformers: `weight` is the gain less 1."""

    def __init__(self, dim):
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class ConvNextLayerNorm(nn.LayerNorm):
    """As in transformers: one class, two layouts."""

    def __init__(self, dim, data_format):
        super().__init__(dim)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def norms():
    return nn.ModuleDict({
        "gemma": GemmaRMSNorm(6), "rms": nn.RMSNorm(6), "last": ConvNextLayerNorm(6, "channels_last"),
        "first": ConvNextLayerNorm(6, "channels_first"), "plain": nn.LayerNorm(6, eps=1e-3), "batch": nn.BatchNorm1d(6),
        "group": nn.GroupNorm(2, 6),
    })  # fmt: skip


def test_norms_on_meta_are_read_as_those_with_numbers():
    with torch.device("meta"):
        there = norms()
        assert len(find(there)) == len(there)
    here, found = find(norms()), find(there)
    assert {name: (f.kind, f.channel_dim, f.eps) for name, f in found.items()} == {
        name: (f.kind, f.channel_dim, f.eps) for name, f in here.items()
    }
    assert here["first"].channel_dim == 1
    assert here["last"].channel_dim == -1
    assert all(f.weight.is_meta for f in found.values())
    assert found["rms"].weight is there["rms"].weight
    assert found["gemma"].weight is not there["gemma"].weight, "the gain that acts is 1 + weight"


def test_a_gain_that_is_not_stored_needs_the_numbers():
    with torch.device("meta"):
        model = norms()
    with pytest.raises(ValueError, match=r"the gain of a GemmaRMSNorm .* load the weights, then convert"):
        convert(model, "un")
    converted = convert(model, {"[!g]*": "un"})
    real = norms()
    assert converted.load_state_dict(real.state_dict(), strict=False, assign=True).unexpected_keys == [
        "batch.running_mean", "batch.running_var", "batch.num_batches_tracked"
    ]  # fmt: skip
    assert torch.equal(converted["plain"].weight, real["plain"].weight)


def written_out(eps):
    """A class whose forward holds the number itself, which copies and moves cannot change."""

    class LayerNorm(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.rand(dim) + 0.5), nn.Parameter(torch.randn(dim))

        def forward(self, x):
            return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)

    return LayerNorm(6)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_an_eps_that_no_attribute_keeps_is_found_by_running(eps, size):
    """nanoGPT's LayerNorm."""
    model, x = nn.Sequential(written_out(eps)), torch.randn(5, 6).double() * size
    assert find(model)["0"].eps == eps
    converted = convert(model, "layer")
    torch.testing.assert_close(converted.double()(x), model.double()(x), rtol=1e-6, atol=1e-6)
    with torch.device("meta"):
        assert find(nn.Sequential(written_out(eps)))["0"].eps == eps


class LayerNormFp32(nn.LayerNorm):
    """As in CLIP: float32 whatever the type of its weights and of its input."""

    def forward(self, x):
        return super().forward(x.type(torch.float32)).type(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_always_computes_in_float32_is_read(dtype):
    model = randomize(nn.Sequential(nn.Linear(4, 6), LayerNormFp32(6), nn.Linear(6, 2))).eval().to(dtype)
    assert find(model)["1"].kind == "layer"
    x = torch.randn(5, 4)
    folded, report = fold(model.float(), x)
    assert report.count("gain folded") == 1
    torch.testing.assert_close(folded(x), model(x))


def test_a_norm_with_nan_is_named_as_such():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()).eval()
    model[1].running_var[2] = torch.nan
    with pytest.raises(ValueError, match=r"1: its running_var has NaN; load or compute it again"):
        convert(model, "un")


def test_an_eps_that_is_none_of_the_usual_is_not_guessed():
    with pytest.raises(ValueError, match=r"its output differs with any eps of 1e-05, .*.* and it has no attribute eps"):
        convert(nn.Sequential(written_out(3e-3)), "un")


@pytest.mark.parametrize("train", [False, True])
def test_resnet_with_our_batch_norm_equals_torchs(train):
    model = randomize(load_torchvision().models.resnet18(num_classes=3)).train(train)
    ours = convert(model, "batch").train(train)
    assert sum(isinstance(m, BatchNorm) for m in ours.modules()) == 20
    for seed in range(2):
        x = torch.randn(3, 3, 40, 32, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ours(x), model(x), rtol=1e-3, atol=1e-4)
    running = torch.stack([model.layer2[0].bn2.running_mean, model.layer2[0].bn2.running_var])
    torch.testing.assert_close(ours.layer2[0].bn2.running, running, rtol=1e-3, atol=1e-5)


def test_frozen_batch_norms_are_read_and_stay_frozen():
    frozen = load_torchvision().ops.FrozenBatchNorm2d(6)
    for t in frozen.buffers():
        t.uniform_(0.5, 2)
    model, x = nn.Sequential(frozen), torch.randn(2, 6, 3, 3)
    ours = convert(model, "batch")
    torch.testing.assert_close(ours.eval()(x), model(x))
    assert [p.requires_grad for p in ours.parameters()] == [False, False]


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a norm with an activation."""

    def __init__(self, dim):
        super().__init__(dim)
        self.drop, self.act = nn.Identity(), nn.PReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class GatedBatchNorm2d(BatchNormAct2d):
    def forward(self, x):
        return self.act(x) * nn.BatchNorm2d.forward(self, x)


def test_norms_that_cannot_be_read_are_named_and_stay():
    model = nn.Sequential(nn.BatchNorm2d(4), GatedBatchNorm2d(4), nn.InstanceNorm2d(4))
    with pytest.warns(
        UserWarning, match=r"cannot read: 1 \(GatedBatchNorm2d contains .*PReLU.*\), 2 \(.*InstanceNorm2d\)"
    ) as seen:
        converted = convert(model, "un")
    assert seen[0].filename == __file__
    assert [type(m).__name__ for m in converted] == ["UN", "GatedBatchNorm2d", "InstanceNorm2d"]
    assert set(unreadable(model)) == {"1", "2"}
    convert(model, {"0": "un"})  # no warning about norms that no pattern selects
    convert(model, "un", where=lambda name, module: name == "0")
    with pytest.raises(ValueError, match="GatedBatchNorm2d"):
        convert(model[1:], "un")


def test_a_norm_with_an_activation_is_converted_alone():
    model, seen = randomize(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4))).eval(), []
    model.append(model[1])  # shared
    model[1].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert list(find(model)) == ["1"]
    assert not unreadable(model)
    converted, x = convert(model, {"1": "batch", "2": "batch"}), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(converted(x), model(x))
    assert seen == [(2, 4, 5, 5)] * 4
    assert converted[1] is converted[2]
    assert [type(m).__name__ for m in converted[1]] == ["BatchNorm", "PReLU"]
    assert list(find(converted)) == ["1.norm"]
    assert {*converted.state_dict()} >= {"1.norm.weight", "1.act.weight"}
    with torch.device("meta"):
        empty = nn.Sequential(BatchNormAct2d(4))
    assert list(find(convert(empty, "un"))) == ["0.norm"]
    blended = blend(model, "un", steps=1)
    torch.testing.assert_close(blended(x), model(x))


def test_modules_around_a_norm_stay():
    class ScaledNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x):
            return self.norm(x) * self.scale

    model, x = nn.Sequential(ScaledNorm()), torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"cannot read: 0 \(no reader for the class name ScaledNorm\)"):
        converted = convert(model, "layer(eps=1e-4)")
    assert list(find(converted)) == ["0.norm"]
    torch.testing.assert_close(converted(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_norm_with_an_activation_is_folded_alone():
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4))).eval()
    folded, report = fold(model, torch.randn(2, 3, 5, 5))
    assert [(row.name, row.action) for row in report.rows] == [("1.norm", "folded back")]
    assert [type(m) for m in folded[1]] == [nn.Identity, nn.PReLU]


NORMS_WITH_ACTIVATIONS = (
    "BatchNormAct2d", "FrozenBatchNormAct2d", "GroupNormAct", "GroupNorm1Act", "LayerNormAct",
    "LayerNormAct2d", "LayerNormActFp32", "LayerNormAct2dFp32", "RmsNormAct", "RmsNormAct2d",
)  # fmt: skip


@pytest.mark.parametrize("name", NORMS_WITH_ACTIVATIONS)
def test_norms_with_activations_of_timm_are_read(name):
    load_torchvision()
    model = randomize(nn.Sequential(getattr(pytest.importorskip("timm.layers.norm_act"), name)(64)))
    assert list(find(model)) == ["0"]
    converted = convert(model, "un")
    assert list(find(converted)) == ["0.norm"]
    assert type(converted[0].act) is nn.ReLU


@pytest.mark.parametrize(
    ("path", "name", "kind", "axis"),
    [
        ("transformers.models.nemotron.modeling_nemotron", "NemotronLayerNorm1P", "layer", -1),
        ("transformers.models.olmo.modeling_olmo", "OlmoLayerNorm", "layer", -1),
        ("transformers.models.squeezebert.modeling_squeezebert", "SqueezeBertLayerNorm", "layer", 1),
        ("transformers.models.poolformer.modeling_poolformer", "PoolFormerGroupNorm", "group", 1),
        ("timm.models.metaformer", "LayerNorm2dNoBias", "layer", 1),
        ("timm.models.metaformer", "GroupNorm1NoBias", "group", 1),
    ],
)
def test_rare_norms_are_read(path, name, kind, axis):
    load_torchvision()
    made = getattr(pytest.importorskip(path), name)(6)
    model = randomize(nn.Sequential(made))
    found = find(model)["0"]
    assert (found.dim, parse(found.kind)[0], found.channel_dim) == (6, kind, axis)
    assert find(convert(model, "un"))["0"].dim == 6


def test_norms_that_ignore_their_own_size_are_left_alone():
    class WeightlessRMSNorm(nn.Module):
        """As in Falcon Mamba, where it normalizes fewer channels than its unused weight has."""

        def __init__(self, size):
            super().__init__()
            self.eps, self.weight = 1e-6, nn.Buffer(torch.ones(size))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(nn.LayerNorm(4), WeightlessRMSNorm(32)).eval()
    with pytest.warns(UserWarning, match="takes inputs of any size, not only of its own size 32"):
        converted = convert(model, "un")
    assert type(converted[1]) is WeightlessRMSNorm
    converted(torch.randn(3, 4))


def test_layers_that_have_no_shape_yet_are_no_obstacle():
    model = nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4), nn.LazyBatchNorm1d())
    assert set(unreadable(model)) == {"2"}
    with pytest.warns(UserWarning, match=r"cannot read: 2 \(.*LazyBatchNorm1d\)"):
        convert(model, "un", inplace=True)
    assert model(torch.randn(3, 5)).shape == (3, 4)
    assert convert(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), "un")(torch.randn(3, 5)).shape == (3, 4)


def test_synchronised_norms_stay_synchronised():
    model = nn.Sequential(nn.SyncBatchNorm(6))
    assert convert(model, "un")[0].spec == "un(sync=True)"
    assert convert(model, "un(sync=False)")[0].spec == "un"
    assert convert(convert(model, "pnv"), "layer")[0].spec == "layer"


class Named(nn.LayerNorm):
    pass


class Odd(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x) + 1


def test_classes_are_known_by_those_that_they_derive_from():
    batch = type("OwnBatch", (nn.BatchNorm1d,), {})
    model = nn.ModuleDict({"named": Named(4), "batch": batch(4), "odd": Odd(4)})
    assert list(find(model)) == ["named", "batch"]
    assert "output differs" in unreadable(model)["odd"]


def test_a_norm_with_parametrizations_is_left_with_the_reason():
    for norm in (nn.LayerNorm(4), make("rms", 4)):
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
        with pytest.raises(ValueError, match="its parameters have parametrizations"):
            convert(nn.Sequential(norm), "un")


def test_a_blend_has_to_be_settled_before_it_is_converted():
    model = blend(nn.Sequential(nn.LayerNorm(4)), "un", steps=2)
    with pytest.raises(ValueError, match=r"settle\(\) a blend first"):
        convert(model, "rms")


def test_a_norm_without_weights_is_read_by_its_size():
    diffusers = pytest.importorskip("diffusers.models.normalization")
    found = find(nn.Sequential(diffusers.RMSNorm(8, eps=1e-6, elementwise_affine=False)))
    assert (found["0"].kind, found["0"].dim, found["0"].eps, found["0"].weight) == ("rms", 8, 1e-6, None)


def test_momentum_of_zero_freezes_statistics():
    original = nn.BatchNorm1d(4, momentum=0.0)
    norm = convert(nn.Sequential(original), "batch")[0].train()
    norm(torch.randn(8, 4) + 5)
    torch.testing.assert_close(norm.running, torch.stack([original.running_mean, original.running_var]))


def test_a_parameter_beside_gain_and_bias_is_not_lost():
    class WithSkip(nn.LayerNorm):
        def __init__(self, dim):
            super().__init__(dim)
            self.skip = nn.Parameter(torch.zeros(dim))  # nothing at first

        def forward(self, x):
            return super().forward(x) + self.skip * x

    assert unreadable(nn.Sequential(WithSkip(4))) == {"0": "it has further parameters (skip)"}
