"""Laws that hold for every norm of the table."""

import copy
import pickle

import pytest
import torch
from norm_cases import DIM, SPECS, STAT_SPECS, batch, random_norm, reads_its_sample, train_step, trained
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import normkit
from normkit.kernels.dispatch import kernels
from normkit.models.hooks import channels_first
from normkit.norms import make

every = pytest.mark.parametrize("spec", SPECS)
every_stat = pytest.mark.parametrize("spec", STAT_SPECS)
TWO = torch.tensor([[True, True, True, False], [True, False, False, False]])


@every
def test_a_single_token_is_a_batch_of_one(spec):
    if not reads_its_sample(spec):
        x = batch(0, DIM)
        assert_close(random_norm(spec)(x), random_norm(spec)(x[None])[0])


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_shape_and_dtype_are_those_of_the_input(spec, dtype, training):
    norm = random_norm(spec, dtype=torch.float32).train(training)
    for shape in [(5, DIM), (2, 3, DIM), (2, 3, 2, DIM), (1, DIM)]:
        y = norm(batch(0, *shape, dtype=dtype))
        assert y.shape == shape
        assert y.dtype is dtype
        assert y.isfinite().all()


@every
def test_contiguity_of_the_input_does_not_matter(spec):
    x, dy = batch(0, 3, 4, DIM), batch(1, 3, 4, DIM)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    assert_close(train_step(random_norm(spec), strided, dy), train_step(random_norm(spec), x, dy))


@every
@pytest.mark.parametrize("kind", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_after_it_may_change_its_output_in_place(spec, kind, dtype):
    """As by `nn.ReLU(inplace=True)` and `y += skip`, with channels first, too."""
    found = []
    for place, layout in ((False, channels_first), (True, channels_first), (True, lambda norm: norm)):
        norm = layout(random_norm(spec, dtype=torch.float32).train())
        x = batch(0, 2, DIM, DIM, DIM, dtype=dtype).requires_grad_()
        for _ in range(3):
            x.grad = None
            with kernels(kind):
                y = norm(x * 1)
                (y.add_(1).relu_() if place else (y + 1).relu()).float().square().mean().backward()
        found.append(x.grad)
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[2].isfinite().all()


@every
def test_content_of_padding_does_not_matter(spec):
    x, dy = batch(0, 2, 4, DIM), batch(1, 2, 4, DIM)
    dy[~TWO] = 0  # a loss ignores padding
    other = x.clone()
    other[~TWO] = batch(2, int((~TWO).sum()), DIM, scale=1e3)
    for step in range(4):
        one = train_step(first := trained(spec, step), x, dy, TWO)
        two = train_step(second := trained(spec, step), other, dy, TWO)
        for name in one:
            if name in ("y", "dx"):
                assert_close(one[name][TWO], two[name][TWO])
            else:
                assert_close(one[name], two[name], msg=lambda text, name=name: f"{name}: {text}")
        assert_close(first.eval()(x, TWO)[TWO], second.eval()(other, TWO)[TWO])


@every
def test_split_is_the_norm_at_inference(spec):
    norm = trained(spec).eval()
    rest, scale, shift = norm.split()
    x = batch(9, 3, 4, DIM)
    assert scale.shape == shift.shape == (DIM,)
    y = norm(x)
    assert_close(rest(x) * scale + shift, y)
    assert_close(channels_first(norm).split().rest(x) * scale + shift, y)  # without the hooks of the norm
    if norm.offline:
        assert_close(rest(x), x)


@every
def test_split_of_a_parametrized_weight_is_the_norm_at_inference(spec):
    norm = trained(spec).eval()
    if norm.weight is None:
        return
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())
    x = batch(9, 3, 4, DIM)
    rest, scale, shift = norm.split()
    assert_close(rest(x) * scale + shift, norm(x))


@every
def test_gradient_is_exact_if_and_only_if_exact_grad(spec):
    norm = trained(spec, steps=6)
    x, dy = batch(0, 2, 4, DIM), batch(1, 2, 4, DIM)  # dy is not zero in the padding
    state = copy.deepcopy(norm.state_dict())
    inputs = [x.requires_grad_(), *(p for p in norm.parameters() if p.requires_grad)]

    def forward(x, *_):
        norm.load_state_dict(state)
        return norm(x, TWO)

    if not norm.exact_grad:
        analytic = torch.autograd.grad(forward(x), x, dy)[0]
        (numeric,) = torch.autograd.functional.vjp(lambda x: _differentiable(norm, state, x), x, dy)[1:]
        assert not torch.allclose(analytic, numeric, rtol=1e-3)
        return
    frozen = [p.detach().clone().requires_grad_() for p in inputs[1:]]

    def by_value(x, *values):
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x, TWO))

    names = [n for n, p in norm.named_parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(by_value, (x, *frozen), atol=1e-6)


def _differentiable(norm, state, x):
    """Run the training forward, with derivatives by finite differences."""
    return _FiniteDifference.apply(norm, state, x)


class _FiniteDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm, state, x):
        ctx.norm, ctx.state = norm, state
        ctx.save_for_backward(x)
        norm.load_state_dict(state)
        return norm(x.detach(), TWO).detach()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx, step = torch.zeros_like(x), 1e-6

        def loss(x):
            ctx.norm.load_state_dict(ctx.state)
            with torch.no_grad():
                return (ctx.norm(x, TWO) * dy).sum()

        for i in range(x.numel()):
            e = torch.zeros_like(x)
            e.view(-1)[i] = step
            dx.view(-1)[i] = (loss(x + e) - loss(x - e)) / (2 * step)
        return None, None, dx


@every
def test_permuting_the_tokens_permutes_the_output(spec):
    norm, other = trained(spec), trained(spec)
    x, dy = batch(0, 6, DIM), batch(1, 6, DIM)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    one, two = train_step(norm, x, dy), train_step(other, x[order], dy[order])
    assert_close(two.pop("y"), one.pop("y")[order])
    assert_close(two.pop("dx"), one.pop("dx")[order])
    assert_close(two, one)


@every
def test_state_round_trips_in_the_middle_of_the_warm_up(spec):
    old = trained(spec, steps=1)
    new = random_norm(spec, seed=5)
    new.load_state_dict(old.state_dict(), strict=True)
    for i in range(4):
        x, dy = batch(i, 6, DIM), batch(9 + i, 6, DIM)
        assert_close(train_step(new, x, dy), train_step(old, x, dy), rtol=0, atol=0)


@every
def test_copies_and_pickles_are_independent_and_alike(spec):
    norm = trained(spec)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        before = copy.deepcopy(twin.state_dict())
        x, dy = batch(3, 6, DIM), batch(4, 6, DIM)
        original = copy.deepcopy(norm)
        assert_close(train_step(twin, x, dy), train_step(original, x, dy))
        assert_close(dict(norm.state_dict()), dict(before))


@every
def test_meta_device_then_reset_parameters_is_a_new_norm(spec):
    with torch.device("meta"):
        norm = make(spec, DIM)
    norm = norm.to_empty(device="cpu")
    norm.reset_parameters()
    assert_close(dict(norm.state_dict()), dict(make(spec, DIM).state_dict()))
    used = trained(spec, dtype=torch.float32)
    used.reset_parameters()
    assert_close(dict(used.state_dict()), dict(make(spec, DIM).state_dict()))


@every
def test_spec_names_the_norm(spec):
    norm = make(spec, DIM)
    assert make(norm.spec, DIM).spec == norm.spec
    assert make(norm.spec, DIM).extra_repr() == norm.extra_repr()
    assert norm.spec in repr(norm)


class NoSync(TorchDispatchMode):
    """Raise on operations that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "aten.equal", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = "aten.index" in str(func) and any(i is not None and i.dtype is torch.bool for i in _indices(args))
        if by_mask or any(word in str(func) for word in self.WAITING):
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


def _indices(args):
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()


@every
@pytest.mark.parametrize("masked", [False, True])
def test_never_waits_for_the_device(spec, masked):
    norm = trained(spec, steps=1, dtype=torch.float32)
    mask = TWO if masked else None
    with normkit.kernels("reference"), NoSync():  # as on a GPU; on a CPU the host is the device
        for i in range(3):
            train_step(norm, batch(i, 2, 4, DIM, dtype=torch.float32), batch(9, 2, 4, DIM, dtype=torch.float32), mask)
    norm.eval()  # a change of mode may wait
    with normkit.kernels("reference"), NoSync():
        norm(batch(0, 2, 4, DIM, dtype=torch.float32), mask)


def test_the_guard_against_waiting_works():
    with NoSync(), pytest.raises(AssertionError, match="wait"):
        torch.ones(3).sum().item()
    with NoSync(), pytest.raises(AssertionError, match="wait"):
        torch.ones(3)[torch.tensor([True, False, True])]


@every
def test_compiles_whole_to_the_same_numbers_without_recompiling(spec):
    # this backend cuts forward and backward apart as the default one does, without waiting for a C++ compiler
    _compiles_alike(spec, "aot_eager_decomp_partition")


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor's linker loses a torch that lies under a path with a space")
@pytest.mark.parametrize("spec", ["layer", "batch", "un(window=2, warmup=2)", "power(groups=0, warmup=2)"])
def test_compiles_alike_with_inductor(spec):
    _compiles_alike(spec, "inductor")


def _compiles_alike(spec: str, backend: str) -> None:
    torch._dynamo.reset()
    eager = random_norm(spec, dtype=torch.float32)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    kinds = {"dtype": torch.float32}
    for i in range(7):
        x, dy = batch(i, 2, 4, DIM, **kinds, scale=1 + i / 4), batch(20 + i, 2, 4, DIM, **kinds)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = train_step(twin, x, dy, TWO, call=compiled)
        want = train_step(eager, x, dy, TWO)
        for name, value in want.items():
            assert_close(got[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, name=name, i=i: f"{i} {name}: {text}")
    eager.eval()
    twin.eval()
    assert_close(compiled(x, TWO), eager(x, TWO))


@every
@torch.no_grad()
def test_compiles_whole_at_inference_without_gradients(spec):
    torch._dynamo.reset()
    norm, x = random_norm(spec).eval(), batch(0, 2, 4, DIM)
    assert_close(torch.compile(norm, fullgraph=True, backend="eager")(x), norm(x))


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_second_derivative_through_batch_statistics_raises(choice):
    norm = random_norm("un(warmup=1)")
    x = batch(0, 6, DIM).requires_grad_()
    y = (x**3 + norm(x)).square().sum()
    with normkit.kernels(choice), pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.gradgradcheck(norm.eval(), [x])


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_large_values_is_right(spec, dtype):
    norm, wide = random_norm(spec, dtype=torch.float32), random_norm(spec, dtype=torch.float64)
    x = (batch(0, 6, DIM).sign() * (300 + batch(1, 6, DIM).abs())).to(dtype)  # squares overflow float16
    for _ in range(4):
        y, reference = norm(x), wide(x.double())
    assert_close(y.double(), reference, rtol=1e-2, atol=1e-2)
    assert (y != 0).any()
    assert_close(norm.eval()(x).double(), wide.eval()(x.double()), rtol=1e-2, atol=1e-2)


@every
def test_computes_in_float32_and_returns_the_type_of_x(spec):
    """The result of float64, up to two roundings to bfloat16."""
    norm, wide = random_norm(spec, dtype=torch.float32), random_norm(spec, dtype=torch.float64)
    for i in range(4):
        x = batch(i, 6, DIM, dtype=torch.bfloat16)
        y, reference = norm(x), wide(x.double())
        assert y.dtype is x.dtype
        assert_close(y.double(), reference, rtol=2.04 * 2**-8, atol=1e-4, msg=f"{norm}: see docs/guides/add-a-norm.md")
    assert_close(norm.eval()(x).double(), wide.eval()(x.double()), rtol=2.04 * 2**-8, atol=1e-4)


@every_stat
def test_double_runs_everything_in_float64(spec):
    norm = make(spec, DIM).double()
    assert all(b.dtype is torch.float64 for _, b in norm.named_buffers() if b.is_floating_point())
    y = norm(batch(0, 6, DIM))
    assert y.dtype is torch.float64


@every
def test_under_autocast_the_output_has_the_type_of_the_input(spec):
    norm = random_norm(spec, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            assert norm(batch(0, 6, DIM, dtype=dtype)).dtype is dtype


@every
def test_small_and_empty_batches_are_defined(spec):
    norm = trained(spec)
    before = copy.deepcopy(norm.state_dict())
    empty = train_step(norm, batch(0, 0, 3, DIM), batch(1, 0, 3, DIM))
    assert empty["y"].shape == (0, 3, DIM)
    assert all(f"d{name}" in empty for name, _ in norm.named_parameters()), "DistributedDataParallel waits for each"
    zeros = train_step(copy.deepcopy(norm), torch.zeros(2, 3, DIM, dtype=torch.float64), batch(1, 2, 3, DIM))
    assert zeros["dx"].isfinite().all()
    padded = train_step(norm, batch(0, 2, 4, DIM), batch(1, 2, 4, DIM), torch.zeros(2, 4, dtype=torch.bool))
    assert padded["y"].isfinite().all()
    assert padded["dx"].isfinite().all()
    for name, value in before.items():
        if name in dict(norm.named_buffers()) and not name.startswith("skipped"):
            assert_close(norm.state_dict()[name], value, rtol=0, atol=0)
    for x in (batch(0, 1, DIM), batch(0, 1, 1, DIM)):
        assert train_step(norm, x, torch.ones_like(x))["y"].isfinite().all()


@every_stat
def test_a_dead_channel_stays_bounded(spec):
    norm = trained(spec, steps=6)
    usual = norm(batch(0, 6, DIM)).abs().max()
    dead = batch(1, 6, DIM)
    dead[:, 2] = 0
    train_step(norm, dead, batch(2, 6, DIM))
    for i in range(3):
        out = train_step(norm, batch(3 + i, 6, DIM), batch(8, 6, DIM))
        assert out["y"].abs().max() < 20 * usual
        assert all(value.isfinite().all() for value in out.values() if value.is_floating_point())


@every
def test_at_inference_offline_norms_export_as_plain_affine_arithmetic(spec):
    norm = trained(spec, dtype=torch.float32).eval()
    x = batch(0, 2, 4, DIM, dtype=torch.float32)
    program = torch.export.export(norm, (x,))
    assert_close(program.module()(x), norm(x))
    if norm.offline:
        after = {
            n.target for n in program.run_decompositions().graph.nodes if n.op == "call_function" and _reads_input(n)
        }
        assert {str(op).split(".")[1] for op in after} <= {
            "mul",
            "add",
            "addcmul",
            "alias",
            "sub",
            "expand",
            "_to_copy",
        }


class Each(torch.nn.ModuleList):
    """All norms on the same input: one export takes as long as that of a single norm."""

    def forward(self, x):
        return tuple(norm(x) for norm in self)


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_at_inference_offline_norms_become_mul_and_add_in_onnx(offline):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    norms = {spec: trained(spec, dtype=torch.float32).eval() for spec in SPECS}
    norms = {spec: norm for spec, norm in norms.items() if norm.offline == offline}
    assert len(norms) > 8
    x = batch(0, 2, 4, DIM, dtype=torch.float32)
    program = torch.onnx.export(Each(norms.values()), (x,), dynamo=True, verbose=False)
    if offline:
        assert {node.op_type for node in program.model.graph} <= {"Mul", "Add", "Identity"}
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for (spec, norm), got in zip(norms.items(), found, strict=True):
        assert_close(torch.from_numpy(got), norm(x), rtol=1e-4, atol=1e-5, msg=spec)


def _reads_input(node) -> bool:
    return any((a.op == "placeholder" and a.name == "x") or _reads_input(a) for a in node.all_input_nodes)


@every
def test_bad_input_raises_with_what_is_allowed(spec):
    norm = make(spec, DIM)
    x = batch(0, 2, 4, DIM, dtype=torch.float32)
    with pytest.raises(ValueError, match="dim=4"):
        norm(x.transpose(1, 2))
    with pytest.raises(TypeError, match="floating-point"):
        norm(x.long())
    with pytest.raises(TypeError, match="tensor"):
        norm([1.0])
    with pytest.raises(TypeError, match="mask"):
        norm(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="mask"):
        norm(x, torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask"):
        norm(x, torch.ones(2, 4, dtype=torch.bool, device="meta"))
