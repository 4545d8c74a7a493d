"""Reading norms of third-party libraries where that takes more than an attribute."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_models import BatchNormAct2d, GemmaRMSNorm, built
from third_party_models import randomize
from torch import nn
from torchvision_stub import load_torchvision

import normkit as nk
from normkit.fold import fold
from normkit.models import convert, find, unreadable
from normkit.models.masks import fit
from normkit.models.take_apart import GatedNorm
from normkit.norms import make, parse


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


class RescaledRMSNorm(nn.RMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


def test_a_norm_with_further_inputs_is_left_as_it_is():
    model = nn.Sequential(RescaledRMSNorm(6), nn.LayerNorm(6))
    assert [*unreadable(model)] == ["0"]
    assert [*find(model)] == ["1"]


def test_a_gain_that_is_not_stored_needs_the_numbers():
    with torch.device("meta"):
        model = norms()
    with pytest.raises(ValueError, match="GemmaRMSNorm"):
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
    with pytest.raises(ValueError, match="eps"):  # none of the usual
        convert(nn.Sequential(written_out(3e-3)), "un")


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


def test_frozen_batch_norms_are_read_and_stay_frozen():
    frozen = load_torchvision().ops.FrozenBatchNorm2d(6)
    for t in frozen.buffers():
        t.uniform_(0.5, 2)
    model, x = nn.Sequential(frozen), torch.randn(2, 6, 3, 3)
    ours = convert(model, "batch")
    torch.testing.assert_close(ours.eval()(x), model(x))
    assert [p.requires_grad for p in ours.parameters()] == [False, False]
    original = nn.BatchNorm1d(4, momentum=0.0)
    norm = convert(nn.Sequential(original), "batch")[0].train()
    norm(torch.randn(8, 4) + 5)
    torch.testing.assert_close(norm.running, torch.stack([original.running_mean, original.running_var]))
    original.running_var[2] = torch.nan
    with pytest.raises(ValueError, match="running_var"):
        convert(nn.Sequential(original), "un")


class GatedBatchNorm2d(BatchNormAct2d):
    def forward(self, x):
        return self.act(x) * nn.BatchNorm2d.forward(self, x)


def test_norms_that_cannot_be_read_are_named_and_stay():
    model = nn.Sequential(nn.BatchNorm2d(4), GatedBatchNorm2d(4), nn.InstanceNorm2d(4))
    with pytest.warns(UserWarning, match="1 .*GatedBatchNorm2d.* 2 .*InstanceNorm2d") as seen:
        converted = convert(model, "un")
    assert seen[0].filename == __file__
    assert [type(m).__name__ for m in converted] == ["UN", "GatedBatchNorm2d", "InstanceNorm2d"]
    assert set(unreadable(model)) == {"1", "2"}
    convert(model, {"0": "un"})  # no warning about norms that no pattern selects
    convert(model, "un", where=lambda name, module: name == "0")
    with pytest.raises(ValueError, match="GatedBatchNorm2d"):
        convert(model[1:], "un")


def test_modules_around_a_norm_stay():
    scale = nn.Parameter(torch.full((4,), 2.0))
    scaled = built(lambda m, x: m.norm(x) * m.scale, kind="ScaledNorm", norm=nn.LayerNorm(4), scale=scale)
    model, x = nn.Sequential(scaled), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="ScaledNorm"):
        converted = convert(model, "layer(eps=1e-4)")
    assert list(find(converted)) == ["0.norm"]
    torch.testing.assert_close(converted(x), model(x), rtol=1e-3, atol=1e-3)


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


def test_a_norm_without_weights_is_read_by_its_size():
    diffusers = pytest.importorskip("diffusers.models.normalization")
    found = find(nn.Sequential(diffusers.RMSNorm(8, eps=1e-6, elementwise_affine=False)))
    assert (found["0"].kind, found["0"].dim, found["0"].eps, found["0"].weight) == ("rms", 8, 1e-6, None)


def test_norms_that_ignore_their_own_size_are_left_alone():
    class WeightlessRMSNorm(nn.Module):
        """As in Falcon Mamba, where it normalizes fewer channels than its unused weight has."""

        def __init__(self, size):
            super().__init__()
            self.eps, self.weight = 1e-6, nn.Buffer(torch.ones(size))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(nn.LayerNorm(4), WeightlessRMSNorm(32)).eval()
    with pytest.warns(UserWarning, match="32"):
        converted = convert(model, "un")
    assert type(converted[1]) is WeightlessRMSNorm
    converted(torch.randn(3, 4))


def test_layers_that_have_no_shape_yet_are_no_obstacle():
    model = nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4), nn.LazyBatchNorm1d())
    assert set(unreadable(model)) == {"2"}
    with pytest.warns(UserWarning, match="2 .*LazyBatchNorm1d"):
        convert(model, "un", inplace=True)
    assert model(torch.randn(3, 5)).shape == (3, 4)
    assert convert(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), "un")(torch.randn(3, 5)).shape == (3, 4)


class RMSNorm(nn.Module):
    """A norm by its name alone."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-6

    def forward(self, x):
        return self.weight * x / x.abs().mean(-1, keepdim=True)


def test_classes_are_known_by_those_that_they_derive_from_and_what_computes_something_else_is_refused():
    odd = type("Odd", (nn.LayerNorm,), {"forward": lambda self, x: 2 * nn.LayerNorm.forward(self, x) + 1})
    named, batch = type("Named", (nn.LayerNorm,), {}), type("OwnBatch", (nn.BatchNorm1d,), {})
    others = {"odd": odd(4), "skip": WithSkip(4), "mean": RMSNorm(4), "wide": nn.LayerNorm((3, 4)),
              "free": nn.BatchNorm1d(4, track_running_stats=False)}  # fmt: skip
    model = nn.ModuleDict({"named": named(4), "batch": batch(4), **others})
    assert list(find(model)) == ["named", "batch"]
    left = unreadable(model)
    assert left.keys() == others.keys()
    assert "output" in left["odd"]
    assert "skip" in left["skip"]
    with pytest.raises(ValueError, match="RMSNorm"):
        convert(nn.Sequential(RMSNorm(4)), "un")


def test_a_norm_with_parametrizations_is_left_with_the_reason():
    for norm in (nn.LayerNorm(4), make("rms", 4)):
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
        with pytest.raises(ValueError, match="parametrizations"):
            convert(nn.Sequential(norm), "un")


def test_a_norm_with_an_activation_is_converted_and_folded_alone():
    model, seen = randomize(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4))).eval(), []
    folded, report = fold(model, x := torch.randn(2, 3, 5, 5))
    assert [(row.name, row.action) for row in report.rows] == [("1.norm", "folded back")]
    assert [type(m) for m in folded[1]] == [nn.Identity, nn.PReLU]
    model.append(model[1])  # shared
    model[1].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert list(find(model)) == ["1"]
    assert not unreadable(model)
    converted = convert(model, {"1": "batch", "2": "batch"})
    torch.testing.assert_close(converted(x), model(x))
    assert seen == [(2, 4, 5, 5)] * 4
    assert converted[1] is converted[2]
    assert [type(m).__name__ for m in converted[1]] == ["BatchNorm", "PReLU"]
    assert list(find(converted)) == ["1.norm"]
    assert {*converted.state_dict()} >= {"1.norm.weight", "1.act.weight"}
    with torch.device("meta"):
        empty = nn.Sequential(BatchNormAct2d(4))
    assert list(find(convert(empty, "un"))) == ["0.norm"]


class WithSkip(nn.LayerNorm):
    def __init__(self, dim):
        super().__init__(dim)
        self.skip = nn.Parameter(torch.zeros(dim))  # nothing at first

    def forward(self, x):
        return super().forward(x) + self.skip * x


# -- norms with a gate, as in Mamba 2 and Qwen3-Next -------------------------------------------------------------------


DIM, HEADS = 8, 3


class MyRMSNormGated(nn.Module):
    """A gate on the input, as in Mamba 2, or on the output, as in Qwen3-Next and Kimi Linear."""

    def __init__(self, gates_input: bool = True, activation=F.silu, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)
        self.variance_epsilon, self.gates_input, self.activation = 1e-3, gates_input, activation
        self.group_size = DIM // groups

    def forward(self, x, gate):
        factor = self.activation(gate.float())
        y = x.float() * factor if self.gates_input else x.float()
        y = y.unflatten(-1, (-1, self.group_size))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)
        y = self.weight * y.flatten(-2)
        return (y if self.gates_input else y * factor).to(x.dtype)


class Mixer(nn.Module):
    """Heads are normalized in rows, as in Qwen3-Next."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(DIM, 2 * HEADS * DIM), norm, nn.Linear(HEADS * DIM, DIM)

    def forward(self, x, real=None):
        y, gate = self.into(x).view(-1, 2, DIM).unbind(1)
        return self.out(self.norm(y, gate).view(*x.shape[:-1], -1))


KINDS = [(True, F.silu, 1), (False, F.silu, 1), (False, torch.sigmoid, 1), (True, F.silu, 2)]


@pytest.mark.parametrize(("gates_input", "activation", "groups"), KINDS)
def test_a_norm_with_a_gate_is_converted_alone_and_folds(gates_input, activation, groups):
    torch.manual_seed(0)
    model, x = Mixer(MyRMSNormGated(gates_input, activation, groups)).eval(), torch.randn(2, 5, DIM)
    assert list(find(model)) == ["norm"]
    same = nk.convert(model, "rms")
    assert isinstance(same.norm, GatedNorm)
    torch.testing.assert_close(same(x), model(x))
    gain, half = nk.fold(model, x)[0].bfloat16(), x.bfloat16()
    torch.testing.assert_close(same.bfloat16()(half), gain(half), rtol=0.1, atol=0.05)
    new = nk.convert(model, "un").train()
    new(torch.randn(4, 5, DIM)).sum().backward()
    folded, report = nk.fold(new.eval(), x)
    assert report.foldable == "1 of 1", str(report)
    assert report.max_error < 1e-12
    assert type(folded.norm.norm) is nn.Identity
    fitted = nk.calibrate(nk.convert(model, "un"), [torch.randn(50, 5, DIM)], like=model)
    assert (fitted(x) - model(x)).square().mean() < 0.5 * model(x).var()


def test_masks_reach_heads_in_rows():
    model = nk.convert(Mixer(MyRMSNormGated(gates_input=False)), "un(warmup=0)", mask_from="real").train()
    x, real = torch.randn(2, 5, DIM), torch.arange(5) < torch.tensor([[5], [2]])
    model(x, real=real)
    mine = model.norm.norm.running.clone()
    model.norm.norm.reset_parameters()
    rows = x[real][None]
    model(rows, real=torch.ones(rows.shape[:2], dtype=torch.bool))
    torch.testing.assert_close(mine, model.norm.norm.running)


def test_the_weight_can_be_read_where_no_kernel_takes_it():
    model = nk.convert(Mixer(MyRMSNormGated()), "un")
    assert model.norm.weight is model.norm.norm.weight
    assert model.norm.variance_epsilon == 1e-3
    assert nk.fold(model.eval(), torch.randn(2, 5, DIM))[0].norm.weight is None
    on_gpu = SimpleNamespace(parameters=lambda: [SimpleNamespace(is_cuda=True)], buffers=list)
    with pytest.raises(RuntimeError, match="use_cache"):
        GatedNorm.weight.fget(SimpleNamespace(norm=on_gpu, training=True))


def test_a_mask_of_an_empty_batch_fits_rows():
    assert fit(torch.ones(0, 5, dtype=torch.bool), torch.Size([0]), time_first=False).shape == (0,)


def test_an_unknown_activation_cannot_be_read():
    with pytest.raises(ValueError, match="MyRMSNormGated"):
        nk.convert(Mixer(MyRMSNormGated(activation=torch.tanh)), "un")
