"""Swapping norms: every source library, everything that must survive, and bad input."""

import copy
import pickle
import threading

import pytest
import torch
from norm_cases import DIM, SPECS, batch, train_step, trained
from small_models import built
from third_party_models import CASES, FAMILIES, case_of, randomize, run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.testing import assert_close

import normkit as nk
from normkit.fold import fold
from normkit.models import calibrate, convert, find, unreadable
from normkit.norms import NORMS, UN, LayerNorm, Norm, PowerNorm, RowNorm, StatNorm, make, options, parse

# -- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_third_party_norm_is_reproduced_and_an_offline_norm_runs_in_its_place(name):
    case = case_of(name)
    found = find(case.model)
    assert len(found) >= 4
    assert not unreadable(case.model)
    before = {key: t.clone() for key, t in case.model.state_dict().items()}
    same = convert(case.model, {site: each.kind for site, each in found.items()})
    assert all(isinstance(same.get_submodule(site), Norm) for site in found)
    with torch.no_grad():
        assert_close(run(case, same), run(case), rtol=2e-4, atol=2e-5)
    converted = convert(case.model, "un", mask_from=case.mask_from).train()
    assert {name for name, _ in case.model.named_parameters()} <= set(converted.state_dict()), "names stay"
    ran = set()
    for site in found:
        converted.get_submodule(site).register_forward_hook(lambda module, args, out, site=site: ran.add(site))
    run(case, converted)
    assert ran == set(found)
    assert all(converted.get_submodule(site).step == 1 for site in found)
    for key, t in case.model.state_dict().items():
        assert_close(t, before[key], rtol=0, atol=0)


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
    assert_close(convert(module, kind)(x), module(x), rtol=1e-4, atol=1e-5)


# -- rules ------------------------------------------------------------------------------------------------------------


def pair():
    return nn.ModuleDict({"encoder": nn.ModuleList(nn.LayerNorm(4) for _ in range(12)), "final_norm": nn.LayerNorm(4)})


def test_first_matching_rule_wins():
    model = convert(pair(), {"encoder.[0-3]": "un", "encoder.1?": "rms(bias=True)", "encoder.*": "batch"})
    kinds = [type(norm).__name__ for norm in model.encoder]
    assert kinds == ["UN"] * 4 + ["BatchNorm"] * 6 + ["RMSNorm"] * 2
    assert type(model.final_norm) is nn.LayerNorm
    model = convert(pair(), "un", where=lambda name, module: name.endswith("norm") and isinstance(module, nn.LayerNorm))
    assert isinstance(model.final_norm, UN)
    assert type(model.encoder[0]) is nn.LayerNorm


def test_eps_and_bias_default_to_those_of_the_old_norm():
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3, bias=False))
    assert convert(model, "un")[0].spec == "un(eps=0.001, bias=False)"
    assert convert(model, "un(eps=1e-6, bias=True)")[0].spec == "un(eps=1e-06)"
    assert convert(nn.Sequential(nn.LayerNorm(4)), "rms")[0].bias is not None
    assert convert(nn.Sequential(nn.LayerNorm(4)), "nonorm")[0].weight is None


# -- what survives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LayerNorm, LayerNorm])
def test_parameters_hooks_mode_dtype_and_sharing_survive(kind):
    shared, recorder = kind(4, dtype=torch.bfloat16), Recorder()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": kind(4, dtype=torch.bfloat16)})
    model["c"].eval()
    shared.weight.requires_grad_(False)
    handle = shared.register_forward_hook(recorder)
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
    assert recorder.outputs[0] is y
    handle.remove()
    assert not model["a"]._forward_hooks


def test_norms_that_a_forward_reads_from_plain_containers_are_replaced_there():
    def forward(m, x):
        return m.linear(m.by_name["last"][0](x + m.norms[0](x)))

    one, two, x = nn.LayerNorm(4), nn.LayerNorm(4), torch.randn(8, 4)
    containers = {"norms": [one], "by_name": {"last": (two,)}, "sizes": [4]}
    model = built(forward, norm1=one, norm2=two, linear=nn.Linear(4, 4), **containers)
    converted = convert(model, {"norm1": "layer", "norm2": "un"})
    assert (converted.norms[0], converted.by_name["last"][0]) == (converted.norm1, converted.norm2)
    assert (model.norms[0], model.by_name["last"][0], model.sizes) == (model.norm1, model.norm2, [4])
    converted(x)
    assert converted.norm2.step == 1
    _, report = fold(converted.eval(), x)
    assert [row.action for row in report] == ["kept", "folded"]


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
    assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
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
        assert_close(compiled(x, **case.kwargs), eager(x, **case.kwargs))
    for (name, mine), theirs in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        assert_close(theirs, mine, msg=name)
    again = pickle.loads(pickle.dumps(model))
    assert_close(run(case, again), run(case, model))


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


@pytest.mark.parametrize(
    ("model", "rules", "where", "error", "named"),
    [
        (nn.Sequential(nn.Linear(3, 3)), "un", None, ValueError, "Linear"),
        (nn.Sequential(nn.InstanceNorm1d(3)), "un", None, ValueError, "InstanceNorm1d"),
        (nn.Sequential(nn.LayerNorm(3)), "un", lambda name, module: False, ValueError, "0"),
        (pair(), {"decoder.*": "un", "*": "layer"}, None, ValueError, r"decoder\.\*.*encoder\.0"),
        (pair(), "bach", None, ValueError, "'batch'"),
    ],
)
def test_wrong_rules_and_models_without_norms_raise(model, rules, where, error, named):
    with pytest.raises(error, match=named):
        convert(model, rules, where=where)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_norm_without_a_weight_takes_its_size_from_an_attribute():
    class MyRMSNorm(nn.Module):
        def forward(self, x):
            return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

    model = nn.Sequential(nn.Linear(4, 4), MyRMSNorm(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"MyRMSNorm.*normalized_shape"):
        convert(model, "un")
    model[1].normalized_shape = (4,)
    same, x = convert(model, "rms"), torch.randn(3, 4)
    assert same[1].spec == "rms(eps=1e-06, affine=False)"
    assert_close(same(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_wrapped_compiled_and_quantized_models_raise():
    def changed(change):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        change(model)
        return model

    # a weight as torchao makes it: a subclass whose `is_floating_point` is True
    foreign = type("AffineQuantizedTensor", (nn.Parameter,), {"__module__": "torchao.dtypes"})
    for model, named in (
        (nn.DataParallel(changed(lambda m: None)), r"DataParallel.*model\.module"),
        (torch.compile(changed(lambda m: None)), "OptimizedModule"),
        (changed(lambda m: m.compile()), "compile"),
        (changed(lambda m: setattr(m[0], "forward", torch.compile(m[0].forward))), "0 is compiled"),
        (changed(lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(4, 4).char(), False))), "int8"),
        (changed(lambda m: m[0]._parameters.update(weight=foreign(torch.zeros(4, 4)))), r"0\.weight.*Quantized"),
    ):
        with pytest.raises(TypeError, match=named):
            convert(model, "un")
    with pytest.raises(TypeError, match="Module"):
        unreadable(3)


def test_a_model_in_ddp_or_sharded_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        with pytest.raises(TypeError, match="DistributedDataParallel"):
            convert(wrapped, "un")
        sharded = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="FSDPModule"):
            convert(sharded, "un")
        part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        distribute_module(part, torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"0\.weight"):
            convert(part, "un")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("verb", ["calibrate", "fold", "audit", "export"])
def test_models_on_meta_convert_and_raise_when_run(verb, tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    converted, x = convert(model, "un").eval(), torch.randn(2, 4)
    given = {"calibrate": ([x],), "export": (tmp_path / "model.pt2", x)}.get(verb, (x,))
    with pytest.raises(ValueError, match=rf"{verb}\(\)"):
        getattr(nk, verb)(converted, *given)


class Recorder:
    """A hook with a state, and with something that cannot be copied."""

    def __init__(self):
        self.outputs, self.lock = [], threading.Lock()

    def __call__(self, module, args, output):
        self.outputs.append(output)


def test_nothing_changes_if_one_norm_cannot_be_built():
    model = nn.Sequential(nn.BatchNorm2d(10), nn.Conv2d(10, 8, 1), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="groups"):
        convert(model, "group(groups=5)", inplace=True)
    assert type(model[0]) is type(model[2]) is nn.BatchNorm2d
    assert not model[0]._forward_pre_hooks


# -- what a new norm takes over of the old one -------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["rms(eps=1e-12)", "scale", "scale(learn=False)", "scale(affine=False)"])
@pytest.mark.parametrize("to", ["rms", "scale(eps=1e-6)", "scale(bias=True)"])
def test_one_length_becomes_gains_and_gains_become_one_length(old, to):
    """ScaleNorm(g) is RMSNorm(g / sqrt(dim)); its length is learned on if it was learned."""
    model, x = nn.Sequential(make(old, 16)), torch.randn(3, 16)
    if model[0].weight is not None:
        nn.init.constant_(model[0].weight, 0.7)
    converted = convert(model, to)
    assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert converted[0].weight.requires_grad == (old in ("rms(eps=1e-12)", "scale"))


def rows(n=64):
    return torch.randn(n, DIM) * torch.linspace(0.5, 4, DIM) + 1


@pytest.mark.parametrize("old", [*NORMS, "power(groups=0)"])
@pytest.mark.parametrize("to", [*NORMS, "power(groups=0)"])
def test_statistics_carry_over_only_to_norms_that_measure_the_same(old, to):
    """Statistics are right, as after calibration, or at their start."""
    model = nn.Sequential(make(old, DIM))
    batches = [rows()]
    measured = isinstance(model[0], StatNorm)
    model = calibrate(model, batches) if measured else model
    new = convert(model, to)[0]
    if isinstance(new, StatNorm):
        scaled = [isinstance(norm, PowerNorm) and norm.groups > 0 for norm in (model[0], new)]
        x = batches[0].double()
        x = x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() if scaled[1] else x
        mean, square = x.mean(0), x.square().mean(0)
        right = torch.stack([mean, square - mean**2]) if new.center else square[None]
        if measured and new.center and not model[0].center:
            right = torch.stack([0 * mean, square])  # of a quadratic mean: the same divisor
        start = make(to, DIM).running
        goes = measured and scaled[0] == scaled[1]
        assert_close(new.running, right.float() if goes else start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_reconverted_norm_keeps_options_parameters_and_state(spec):
    """Only what the spec sets is new."""
    norm = trained(spec)
    twin = copy.deepcopy(norm)
    twin.eps = 1e-6
    new = convert(norm, f"{parse(spec)[0]}(eps=1e-6)")
    assert new is not norm
    assert new.spec == twin.spec
    assert new.state_dict().keys() == twin.state_dict().keys()
    for training in (False, True, True):
        x, dy = batch(7, 6, DIM), batch(8, 6, DIM)
        assert_close(train_step(new.train(training), x, dy), train_step(twin.train(training), x, dy))


def test_options_of_the_spec_are_new():
    model = nn.Sequential(make("dyt(alpha=1.0)", DIM))
    nn.init.constant_(model[0].a, 2.0)
    assert convert(model, "dyt(bias=False)")[0].a == 2
    assert convert(model, "dyt(bias=False)")[0].alpha == 1.0
    assert convert(model, "dyt(alpha=0.25)")[0].a == 0.25
    assert convert(model, "dyt(bias=False)", inplace=True)[0].a is model[0].a, "an optimizer may hold it"
    un = nn.Sequential(trained("un(window=2, warmup=2)").float())
    assert convert(un, "un(window=3)")[0].step == 0, "a window of another size starts empty, and with it the count"
    assert_close(convert(un, "un(window=3)")[0].running, un[0].running)
    assert convert(un, "un(window=2, sync=True)")[0].step == un[0].step


def test_a_derived_class_goes_by_the_norm_that_it_is():
    class Mine(UN):
        def __init__(self, dim, *, window=2, note="x"):
            super().__init__(dim, window=window)
            self.note = note

    class Own(RowNorm):
        def normalize(self, x, mask):
            return x

    model = nn.Sequential(Mine(DIM), Own(DIM))
    assert repr(model[0]) == f"Mine({DIM}, un(window=2))"
    assert repr(model[1]) == f"Own({DIM}, Own)"
    assert find(model)["0"].kind == "un(window=2)"
    train_step(model[0], batch(0, 6, DIM).float(), batch(1, 6, DIM).float())
    new = convert(model, {"0": "un(alpha=0.5)"})[0]
    assert (new.spec, new.step) == ("un(window=2, alpha=0.5)", 1)
    assert_close(new.running, model[0].running)


@pytest.mark.parametrize(("momentum", "alpha"), [(0.1, 0.9), (0.01, 0.99), (0.07, 0.93), (1.0, 0.0), (None, 0.9)])
def test_momentum_becomes_its_complement(momentum, alpha):
    model = nn.Sequential(nn.BatchNorm1d(DIM, momentum=momentum)).eval()
    assert convert(model, "batch")[0].alpha == alpha
    assert convert(model, "repbn")[0].alpha == alpha
    assert convert(model, "batch(alpha=0.5)")[0].alpha == 0.5
    assert convert(model, "un")[0].alpha == options("un")["alpha"]
    if momentum is not None:
        ours, x = convert(model, "batch"), rows()
        model.train(), ours.train()
        assert_close(ours(x), model(x), rtol=1e-4, atol=1e-5)
        assert_close(ours[0].running[1], model[0].running_var)


@pytest.mark.parametrize("change", [lambda m: convert(m, "pnv"), lambda m: convert(m, "rms"), copy.deepcopy])
def test_full_backward_hooks_still_run(change):
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), []
    model[1].register_full_backward_hook(lambda module, given, taken: calls.append(module))
    new = change(model)
    new(torch.randn(2, 4)).sum().backward()
    assert calls == [new[1]]
