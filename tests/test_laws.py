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
@pytest.mark.parametrize("kind", ["auto", "reference"])
def test_a_layer_after_it_may_change_its_output_in_place(spec, kind):
    """As by `nn.ReLU(inplace=True)` and `y += skip`, with channels first, too."""
    found = []
    for place, layout in ((False, channels_first), (True, channels_first), (True, lambda norm: norm)):
        norm = layout(random_norm(spec, dtype=torch.float32).train())
        x = batch(0, 2, DIM, DIM, DIM, dtype=torch.float32).requires_grad_()
        for _ in range(3):
            x.grad = None
            with kernels(kind):
                y = norm(x * 1)
                (y.add_(1).relu_() if place else (y + 1).relu()).square().mean().backward()
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
    x = batch(9, 3, 4, DIM)
    for parametrized in (False, True):
        if parametrized and norm.weight is not None:
            torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())
        rest, scale, shift = norm.split()
        assert scale.shape == shift.shape == (DIM,)
        y = norm(x)
        assert_close(rest(x) * scale + shift, y)
        if norm.offline:
            assert_close(rest(x), x)
    assert_close(channels_first(norm).split().rest(x) * scale + shift, y)  # without the hooks of the norm


@every
def test_gradient_is_exact_if_and_only_if_exact_grad(spec):
    norm = trained(spec, steps=6)
    x, dy = batch(0, 2, 4, DIM), batch(1, 2, 4, DIM)  # dy is not zero in the padding
    state = copy.deepcopy(norm.state_dict())

    def loss(x):
        norm.load_state_dict(state)
        return (norm(x, TWO) * dy).sum()

    analytic = torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)[0]
    with torch.no_grad():
        steps = 1e-6 * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
        numeric = torch.stack([loss(x + step) - loss(x - step) for step in steps]).view_as(x) / 2e-6
    assert torch.allclose(analytic, numeric, rtol=1e-4, atol=1e-6) == norm.exact_grad


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


def test_compiles_whole_to_the_same_numbers_without_recompiling():
    # this backend cuts forward and backward apart as the default one does, without waiting for a C++ compiler
    _compiles_alike(SPECS, "aot_eager_decomp_partition")


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor's linker loses a torch that lies under a path with a space")
def test_compiles_alike_with_inductor():
    _compiles_alike(["un(window=2, warmup=2)"], "inductor")


class Each(torch.nn.ModuleList):
    """Norms side by side: one graph takes as long to compile or to export as that of a single norm."""

    def forward(self, x, mask=None):
        xs = x if isinstance(x, tuple) else (x,) * len(self)
        return tuple(norm(x, mask) for norm, x in zip(self, xs, strict=True))


def _compiles_alike(specs: list[str], backend: str) -> None:
    torch._dynamo.reset()
    eager = Each(random_norm(spec, dtype=torch.float32) for spec in specs)
    twin = copy.deepcopy(eager)
    compiled, kinds = torch.compile(twin, fullgraph=True, backend=backend), {"dtype": torch.float32}

    def step(model, call, i):
        model.zero_grad()
        x, dy = batch(i, 2, 4, DIM, **kinds, scale=1 + i / 4), batch(20 + i, 2, 4, DIM, **kinds)
        xs = tuple(x.clone().requires_grad_() for _ in specs)
        ys = call(xs, TWO)
        torch.autograd.backward(ys, [dy] * len(specs))
        return [
            *ys,
            *(x.grad for x in xs),
            *(p.grad for p in model.parameters()),
            *(b.clone() for b in model.buffers()),
        ]

    for i in range(7):
        expected = step(eager, eager, i)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            found = step(twin, compiled, i)
        assert_close(found, expected, rtol=2e-4, atol=2e-5)
    eager.eval(), twin.eval()
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            assert_close(compiled(x := batch(0, 2, 4, DIM, **kinds), TWO), eager(x, TWO))


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_second_derivative_through_batch_statistics_raises(choice):
    norm = random_norm("un(warmup=1)")
    x = batch(0, 6, DIM).requires_grad_()
    y = (x**3 + norm(x)).square().sum()
    with normkit.kernels(choice), pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.gradgradcheck(norm.eval(), [x])


@every
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.bfloat16, False), (torch.float16, True), (torch.bfloat16, True)], ids=str
)
def test_computes_in_float32_and_returns_the_type_of_x(spec, dtype, large):
    """The result of float64, up to two roundings to bfloat16; also where squares overflow float16."""
    norm, wide = random_norm(spec, dtype=torch.float32), random_norm(spec, dtype=torch.float64)
    bound = {"rtol": 1e-2, "atol": 1e-2} if large else {"rtol": 2.04 * 2**-8, "atol": 1e-4}
    for i in range(4):
        x = (batch(0, 6, DIM).sign() * (300 + batch(1, 6, DIM).abs()) if large else batch(i, 6, DIM)).to(dtype)
        y, reference = norm(x), wide(x.double())
        assert y.dtype is x.dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert all(copy.deepcopy(norm)(given).dtype is given.dtype for given in (x, x.float()))
        assert (y != 0).any()
        assert_close(y.double(), reference, **bound, msg=f"{norm}: see docs/guides/add-a-norm.md")
    assert_close(norm.eval()(x).double(), wide.eval()(x.double()), **bound)


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


def _reads_input(node) -> bool:
    return any((a.op == "placeholder" and a.name == "x") or _reads_input(a) for a in node.all_input_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_at_inference_offline_norms_export_as_multiplications_and_additions(offline):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    norms = {spec: trained(spec, dtype=torch.float32).eval() for spec in SPECS}
    norms = {spec: norm for spec, norm in norms.items() if norm.offline == offline}
    assert len(norms) > 8
    x = batch(0, 2, 4, DIM, dtype=torch.float32)
    exported = torch.export.export(Each(norms.values()), (x,))
    program = torch.onnx.export(Each(norms.values()), (x,), dynamo=True, verbose=False)
    if offline:
        nodes = [node for node in exported.run_decompositions().graph.nodes if node.op == "call_function"]
        after = {str(node.target).split(".")[1] for node in nodes if _reads_input(node)}
        assert after <= {"mul", "add", "addcmul", "alias", "sub", "expand", "_to_copy"}
        assert {node.op_type for node in program.model.graph} <= {"Mul", "Add", "Identity"}
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for (spec, norm), one, other in zip(norms.items(), exported.module()(x), found, strict=True):
        assert_close(one, norm(x), msg=spec)
        assert_close(torch.from_numpy(other), norm(x), rtol=1e-4, atol=1e-5, msg=spec)


# -- results that rounding could lose: long sums, large means, a share of the whole ------------------------------------


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if list(random_norm(spec).parameters())])
def test_gradients_of_parameters_are_summed_in_float32(spec, choice, dtype):
    """In bfloat16 a long sum stops growing: PyTorch's LayerNorm loses 0.9 of the bias's."""
    norm, wide = random_norm(spec, dtype=torch.float32), random_norm(spec)
    x, dy = (batch(0, 4, 1024, DIM) * 2 + 1).to(dtype), batch(1, 4, 1024, DIM).abs().to(dtype)
    with normkit.kernels(choice):
        norm(x.requires_grad_()).backward(dy)
    wide(x.detach().double()).backward(dy.double())
    for got, expected in zip(norm.parameters(), wide.parameters(), strict=True):
        assert_close(got.grad.double(), expected.grad, rtol=2e-3, atol=2e-3 * expected.grad.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(DIM,), (3, DIM), (2, 3, DIM)])
@pytest.mark.parametrize("spec", ["layer", "rms(bias=True)", "scale(bias=True)"])
def test_per_token_norms_are_differentiated_twice_and_in_batches(spec, shape, dtype):
    found = {}
    for choice in ("auto", "reference"):
        norm, x = random_norm(spec, dtype=torch.float32), batch(0, *shape, dtype=dtype).requires_grad_()
        with normkit.kernels(choice):
            y = norm(x)
            (first,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
            twice = torch.autograd.grad(first.float().square().sum(), [x, *norm.parameters()], allow_unused=True)
            dys = torch.stack([torch.ones_like(y), y.detach()])
            together = torch.autograd.grad(norm(x), [x, *norm.parameters()], dys, is_grads_batched=True)
            y = norm(x)
            mapped = torch.vmap(lambda dy, y=y, x=x: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)
        found[choice] = [t for t in (*twice, *together, mapped) if t is not None]
    loose = {} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.3}
    for got, expected in zip(found["auto"], found["reference"], strict=True):
        assert_close(got, expected, **loose)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_variance_beside_a_large_mean_survives_joining(parts, mean):
    """By one process that synchronizes, and by several batches of one optimizer step."""
    norm, x = make("batch(alpha=0, sync=True)", DIM), batch(0, 4096, DIM, dtype=torch.float32) + mean
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    if parts > 1:
        normkit.follow_optimizer(norm, optimizer)
    for rows in x.chunk(parts):
        norm(rows)
    optimizer.step()
    assert_close(norm.running[1].double(), x.double().var(0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("spec", ["batch(alpha=0)", "pnv(alpha=0)", "un(alpha=0)", "mabn(alpha=0)", "renorm(alpha=0)"])
def test_a_share_of_zero_forgets_large_values(spec, choice):
    norm = make(spec, 2)
    with normkit.kernels(choice):
        norm(batch(0, 512, 2, dtype=torch.float32) * 1000)
        x = batch(1, 512, 2, dtype=torch.float32) * torch.tensor([1e-1, 1e-2])
        norm(x)
    expected = x.var(0) if norm.center else x.square().mean(0)
    assert_close(norm.running[-1], expected, rtol=2e-3, atol=1e-6 if spec.startswith("renorm") else 0)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if reads_its_sample(spec)] + ["instance"])
def test_a_sample_of_padding_alone_stays_small(spec):
    x = batch(0, 2, 3, DIM, dtype=torch.float32) * 300
    mask = torch.tensor([[True] * 3, [False] * 3])
    y = make(spec, DIM)(x, mask)
    assert y.abs().max() <= x.abs().max()
