"""Swapping norms: every source library, everything that must survive, and bad input."""

import copy
import pickle
import threading

import pytest
import torch
from third_party_models import CASES, case_of, randomize
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.utils import prune

from normkit.fold import audit, fold
from normkit.models import calibrate, convert, export, find, unreadable
from normkit.models.third_party import CannotRead, equivalent, read_norm
from normkit.norms import UN, BatchNorm, LayerNorm, Norm, RMSNorm, make


def run(case, model=None, **changes):
    out = (case.model if model is None else model)(*case.args, **{**case.kwargs, **changes})
    return out if isinstance(out, torch.Tensor) else case.outputs(out)


def same_kind(found):
    """The rules that put our own version in place of every norm."""
    return {name: each.kind for name, each in found.items()}


# -- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_third_party_norm_is_reproduced(name):
    case = case_of(name)
    found = find(case.model)
    assert len(found) >= 4
    assert not unreadable(case.model)
    converted = convert(case.model, same_kind(found))
    assert all(isinstance(converted.get_submodule(site), Norm) for site in found)
    with torch.no_grad():
        torch.testing.assert_close(run(case, converted), run(case), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_an_offline_norm_really_runs_in_place_of_every_norm(name):
    case = case_of(name)
    converted = convert(case.model, "un", mask_from=case.mask_from)
    assert {name for name, _ in case.model.named_parameters()} <= set(converted.state_dict()), "names stay"
    ran = set()
    for site in find(case.model):
        norm = converted.get_submodule(site)
        assert isinstance(norm, UN)
        norm.register_forward_hook(lambda module, args, out, site=site: ran.add(site))
    before = {key: t.clone() for key, t in case.model.state_dict().items()}
    converted.train()
    run(case, converted)
    assert ran == set(find(case.model))
    assert all(norm.step == 1 for norm in converted.modules() if isinstance(norm, UN))
    for key, t in case.model.state_dict().items():
        torch.testing.assert_close(t, before[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "kind", "shape"),
    [
        (nn.LayerNorm(6, eps=1e-3), "layer", (2, 5, 6)),
        (nn.LayerNorm(6, bias=False), "layer", (2, 5, 6)),
        (nn.LayerNorm(6, elementwise_affine=False), "layer", (2, 5, 6)),
        (nn.RMSNorm(6, eps=1e-3), "rms", (2, 5, 6)),
        (nn.RMSNorm(6), "rms", (2, 5, 6)),
        (nn.BatchNorm1d(6, eps=1e-3), "batch", (2, 6, 5)),
        (nn.BatchNorm1d(6, affine=False), "batch", (5, 6)),
        (nn.BatchNorm2d(6, momentum=0.25), "batch(alpha=0.75)", (2, 6, 4, 3)),
        (nn.BatchNorm3d(6), "batch", (2, 6, 4, 3, 5)),
        (nn.SyncBatchNorm(6, eps=1e-3), "batch(sync=True)", (2, 6, 4, 3)),
        (nn.GroupNorm(3, 6, eps=1e-3), "group(groups=3, over='sample')", (2, 6, 4, 3)),
    ],
)
def test_torch_norms_convert_to_our_own_at_any_layout(module, kind, shape):
    module = randomize(nn.Sequential(module)).eval()
    assert find(module)["0"].kind == kind
    x = torch.randn(shape) * torch.linspace(0.01, 2, shape[-1])
    torch.testing.assert_close(convert(module, kind)(x), module(x), rtol=1e-4, atol=1e-5)


def test_batch_statistics_carry_over_to_norms_without_mean():
    model = randomize(nn.Sequential(nn.BatchNorm1d(6))).eval()
    converted = convert(model, "un")
    quadratic = model[0].running_var + model[0].running_mean.square()
    torch.testing.assert_close(converted[0].running[0], quadratic)
    again = convert(converted, "batch")
    x = torch.randn(3, 6)
    torch.testing.assert_close(again(x), converted(x))


@pytest.mark.parametrize("center", [True, False])
def test_our_own_norms_convert_too_with_their_statistics(center):
    model = randomize(nn.Sequential(make("renorm" if center else "un", 6))).eval()
    converted = convert(model, "batch" if center else "pnv")
    x = torch.randn(4, 6)
    assert type(converted[0]) is not type(model[0])
    torch.testing.assert_close(converted(x), model(x))


def test_gains_become_one_length_in_scale_norm():
    model = nn.Sequential(nn.RMSNorm(16, eps=1e-12))
    nn.init.constant_(model[0].weight, 0.7)
    x = torch.randn(3, 16)
    torch.testing.assert_close(convert(model, "scale")(x), model(x))
    torch.testing.assert_close(convert(model, "scale(bias=True)")(x), model(x))


# -- rules ------------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.LayerNorm(4) for _ in range(12)])
        self.final_norm = nn.LayerNorm(4)

    def forward(self, x):
        for norm in self.encoder:
            x = norm(x) + x
        return self.final_norm(x)


def test_first_matching_rule_wins():
    model = convert(Pair(), {"encoder.[0-3]": "un", "encoder.1?": "rms(bias=True)", "encoder.*": "batch"})
    kinds = [type(norm).__name__ for norm in model.encoder]
    assert kinds == ["UN"] * 4 + ["BatchNorm"] * 6 + ["RMSNorm"] * 2
    assert type(model.final_norm) is nn.LayerNorm


def test_a_predicate_chooses_by_name_and_module():
    model = convert(Pair(), "un", where=lambda name, module: name.endswith("norm") and isinstance(module, nn.LayerNorm))
    assert isinstance(model.final_norm, UN)
    assert type(model.encoder[0]) is nn.LayerNorm


def test_a_norm_that_already_fits_the_rule_stays():
    model = nn.Sequential(make("un(window=2)", 4), LayerNorm(4))
    model[0].step += 7
    converted = convert(model, {"0": "un(window=2)", "1": "layer"})
    assert converted[0].step == 7
    assert convert(model, {"0": "un(window=3)"})[0].window == 3


def test_eps_and_bias_default_to_those_of_the_old_norm():
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3, bias=False))
    assert convert(model, "un")[0].spec == "un(eps=0.001, bias=False)"
    assert convert(model, "un(eps=1e-6, bias=True)")[0].spec == "un(eps=1e-06)"
    assert convert(nn.Sequential(nn.LayerNorm(4)), "rms")[0].bias is not None
    assert convert(nn.Sequential(nn.LayerNorm(4)), "nonorm")[0].weight is None


# -- what survives ----------------------------------------------------------------------------------------------------


def test_parameters_hooks_mode_dtype_and_sharing_survive():
    shared = nn.LayerNorm(4, dtype=torch.bfloat16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.LayerNorm(4, dtype=torch.bfloat16)})
    model["c"].eval()
    shared.weight.requires_grad_(False)
    seen = []
    handle = shared.register_forward_hook(lambda module, args, out: seen.append(out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted = convert(model, "un", inplace=True)
    assert converted is model
    assert model["a"] is model["b"][0]
    assert model["a"].weight is shared.weight
    assert not model["a"].weight.requires_grad
    assert model["a"].bias.requires_grad
    assert (model["a"].training, model["c"].training) == (True, False)
    assert model["a"].weight.dtype == torch.bfloat16
    assert model["a"].running.dtype == torch.float32, "statistics stay wide"
    assert {id(p) for p in model.parameters()} == {id(p) for group in optimizer.param_groups for p in group["params"]}
    y = model["a"](torch.randn(3, 4, dtype=torch.bfloat16))
    assert seen[0] is y
    handle.remove()
    model["a"](torch.randn(3, 4, dtype=torch.bfloat16))
    assert len(seen) == 1


def test_norms_that_a_forward_reads_from_plain_containers_are_replaced_there():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2, self.linear = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 4)
            self.norms, self.by_name, self.sizes = [self.norm1], {"last": (self.norm2,)}, [4]

        def forward(self, x):
            return self.linear(self.by_name["last"][0](x + self.norms[0](x)))

    model, x = Model(), torch.randn(8, 4)
    converted = convert(model, {"norm1": "layer", "norm2": "un"})
    assert (converted.norms[0], converted.by_name["last"][0]) == (converted.norm1, converted.norm2)
    assert (model.norms[0], model.by_name["last"][0], model.sizes) == (model.norm1, model.norm2, [4])
    converted(x)
    assert converted.norm2.step == 1
    _, report = fold(converted.eval(), x)
    assert [row.action for row in report] == ["kept", "folded"]


def test_the_model_itself_may_be_a_norm_and_copies_are_independent():
    norm = nn.LayerNorm(4)
    converted = convert(norm, "batch")
    assert isinstance(converted, BatchNorm)
    converted.weight.data.fill_(3)
    assert norm.weight[0] == 1


def test_channels_first_norms_keep_layout_and_user_hooks():
    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = nn.Sequential(LayerNorm2d(5))
    shapes = []
    model[0].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    model[0].register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    x = torch.randn(2, 5, 3, 4)
    converted = convert(convert(model, "un"), "layer")
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert set(shapes) == {x.shape}
    assert list(converted.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_a_converted_model_compiles_whole_and_pickles():
    case = CASES["torch_encoder_pre"]()
    model = convert(case.model, "un(warmup=2)", mask_from="src_key_padding_mask")
    compiled = torch.compile(copy.deepcopy(model).train(), backend="aot_eager", fullgraph=True)
    eager = copy.deepcopy(model).train()
    for step in range(3):
        x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(compiled(x, **case.kwargs), eager(x, **case.kwargs))
    for (name, mine), theirs in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(theirs, mine, msg=name)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(run(case, again), run(case, model))


@pytest.mark.parametrize("name", ["torch_encoder_post", "torch_encoder_pre"])
def test_the_fused_fast_path_does_not_bypass_the_new_norm(name):
    case = CASES[name]()
    rules = {"*": "un"} if name.endswith("pre") else {"layers.1.norm2": "un"}
    model = randomize(convert(case.model, rules)).eval()
    new = {site: norm for site, norm in model.named_modules() if isinstance(norm, UN)}
    ran = set()
    for site, norm in new.items():  # the fast path also gives way to hooks, so they come after the output
        norm.forward = lambda x, mask=None, site=site, norm=norm: (ran.add(site), UN.forward(norm, x, mask))[1]
    with torch.no_grad():
        model(*case.args, **case.kwargs)
    assert ran == set(new)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_nothing_to_convert_raises_with_the_modules_found():
    with pytest.raises(ValueError, match=r"no class in this model has 'norm' in its name.*Linear"):
        convert(nn.Sequential(nn.Linear(3, 3)), "un")
    with pytest.raises(ValueError, match="InstanceNorm1d"):
        convert(nn.Sequential(nn.InstanceNorm1d(3)), "un")
    with pytest.raises(ValueError, match=r"its rules select none: 0"):
        convert(nn.Sequential(nn.LayerNorm(3)), "un", where=lambda name, module: False)


def test_pattern_without_a_norm_and_wrong_spec_raise():
    with pytest.raises(ValueError, match=r"'decoder\.\*' matches no norm; the norms are encoder\.0"):
        convert(Pair(), {"decoder.*": "un", "*": "layer"})
    with pytest.raises(ValueError, match="did you mean 'batch'"):
        convert(Pair(), "bach")
    with pytest.raises(TypeError, match="a spec such as 'un', or rules"):
        convert(Pair(), ["un"])
    with pytest.raises(TypeError, match=r"rules go from a pattern of names, .* to a spec; got 1"):
        convert(Pair(), {1: "un"})
    with pytest.raises(TypeError, match="where is a function of a norm's name and the norm; got 'encoder'"):
        convert(Pair(), "un", where="encoder")


def test_modules_that_are_norms_by_name_only_are_refused():
    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 2

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, x):
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    for module in (LayerNorm(4), RMSNorm(), nn.LayerNorm((3, 4)), nn.BatchNorm1d(4, track_running_stats=False)):
        with pytest.raises(CannotRead):
            read_norm(module)
    with pytest.raises(ValueError, match="RMSNorm computes something else than its name suggests"):
        convert(nn.Sequential(RMSNorm()), "un")


def test_a_norm_without_a_weight_takes_its_size_from_an_attribute():
    class MyRMSNorm(nn.Module):
        def forward(self, x):
            return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

    model = nn.Sequential(nn.Linear(4, 4), MyRMSNorm(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"MyRMSNorm cannot be read \(it has no weight; set its normalized_shape"):
        convert(model, "un")
    model[1].normalized_shape = (4,)
    same, x = convert(model, "rms"), torch.randn(3, 4)
    assert same[1].spec == "rms(eps=1e-06, affine=False)"
    torch.testing.assert_close(same(x), model(x))


def test_our_equivalent_of_a_reading_shares_nothing():
    module = nn.LayerNorm(4)
    norm = equivalent(read_norm(module))
    norm.weight.data.zero_()
    assert module.weight.sum() == 4
    assert isinstance(equivalent(read_norm(RMSNorm(4, eps_at="outside"))), RMSNorm)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_wrapped_compiled_and_quantized_models_raise():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(TypeError, match=r"DataParallel.*model\.module"):
        convert(nn.DataParallel(model), "un")
    with pytest.raises(TypeError, match=r"OptimizedModule.*compile the result"):
        convert(torch.compile(model), "un")
    compiled = copy.deepcopy(model)
    compiled.compile()
    with pytest.raises(TypeError, match="compile after"):
        convert(compiled, "un")
    compiled = copy.deepcopy(model)
    compiled[0].forward = torch.compile(compiled[0].forward)
    with pytest.raises(TypeError, match="0 is compiled; compile after"):
        convert(compiled, "un")
    with pytest.raises(TypeError, match=r"unreadable\(\) takes an nn\.Module"):
        unreadable(3)
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        convert("model", "un")
    quantized = copy.deepcopy(model)
    quantized[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"stored as torch.int8.*then quantize"):
        convert(quantized, "un")
    foreign = copy.deepcopy(model)  # a weight as torchao makes it: a subclass whose `is_floating_point` is True
    kind = type("AffineQuantizedTensor", (nn.Parameter,), {"__module__": "torchao.dtypes"})
    foreign[0]._parameters["weight"] = kind(torch.zeros(4, 4))
    with pytest.raises(TypeError, match=r"0\.weight is a quantized AffineQuantizedTensor.*then quantize"):
        convert(foreign, "un")


def test_a_model_in_ddp_or_sharded_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        with pytest.raises(TypeError, match="DistributedDataParallel"):
            convert(wrapped, "un")
        sharded = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"FSDPModule.*before fully_shard"):
            convert(sharded, "un")
        part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        distribute_module(part, torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"0\.weight is sharded.*before sharding"):
            convert(part, "un")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", ["weight_norm", "pruning", "pruning in a trained model"])
def test_weights_computed_before_forward_fold(change):
    """PyTorch refuses to copy such a model until it has run without gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    if change == "weight_norm":
        nn.utils.weight_norm(model[0])
    else:
        prune.l1_unstructured(model[0], "weight", 0.5)
    if change == "pruning in a trained model":
        model(x).sum().backward()
    torch.testing.assert_close(convert(model, "layer")(x), model(x))
    trained = convert(model, "un(warmup=1, window=1)")
    trained(x).sum().backward()
    calibrated = calibrate(trained, [x]).eval()
    folded, _ = fold(calibrated, x)
    torch.testing.assert_close(folded(x), calibrated(x), rtol=1e-4, atol=1e-5)
    assert {name for name, _ in trained.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_models_on_meta_convert_and_raise_when_run(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    converted = convert(model, "un")
    runs = {
        "calibrate": lambda: calibrate(converted, [torch.randn(2, 4)]),
        "fold": lambda: fold(converted.eval(), torch.randn(2, 4)),
        "audit": lambda: audit(converted.eval(), torch.randn(2, 4)),
        "export": lambda: export(converted.eval(), tmp_path / "model.pt2", torch.randn(2, 4)),
    }
    for verb, attempt in runs.items():
        with pytest.raises(
            ValueError, match=rf"{verb}\(\) reads the model, and \d+ of its tensors have no values .*load"
        ):
            attempt()


class Recorder:
    """A hook with a state, and with something that cannot be copied."""

    def __init__(self):
        self.outputs, self.lock = [], threading.Lock()

    def __call__(self, module, args, output):
        self.outputs.append(output)


@pytest.mark.parametrize("kind", [nn.LayerNorm, LayerNorm])
def test_hooks_with_a_state_stay_the_same(kind):
    model, recorder = nn.Sequential(nn.Linear(4, 4), kind(4)), Recorder()
    handle = model[1].register_forward_hook(recorder)
    model(torch.randn(3, 4))
    assert list(find(model)) == ["1"]
    convert(model, "un", inplace=True)
    model(torch.randn(3, 4))
    assert len(recorder.outputs) == 2
    handle.remove()
    assert not model[1]._forward_hooks


def test_nothing_changes_if_one_norm_cannot_be_built():
    model = nn.Sequential(nn.BatchNorm2d(10), nn.Conv2d(10, 8, 1), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="groups must be a divisor of dim=8"):
        convert(model, "group(groups=5)", inplace=True)
    assert type(model[0]) is type(model[2]) is nn.BatchNorm2d
    assert not model[0]._forward_pre_hooks
