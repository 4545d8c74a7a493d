"""Every kernel against the float64 reference.

`test_triton.py` runs this file in a child process where Triton interprets kernels on the CPU, and on a CUDA device once
more without the interpreter, at real sizes.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import triton_driver
from norm_cases import PER_TOKEN, WITH_KERNEL_RULE, WITHOUT_KERNEL_RULE, several_steps
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.kernels import dispatch, ops, reference
from normkit.kernels import triton as kernels
from normkit.kernels.async_counter import AsyncCounter
from normkit.kernels.rule import find_kernel_rule

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # triton 3.6's own
REAL = not dispatch.is_interpreted()
DEVICE = "cuda" if REAL else "cpu"
if not REAL:
    triton_driver.install()
SHAPES = [(4099, 512), (777, 4096), (257, 8100)] if REAL else [(7, 37), (64, 384), (1, 96), (33, 64)]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
NORMS = {  # name -> (kernel kind, groups, the reference)
    "layer": ("layer", 1, lambda x, w, b: ops.row_norm(x, w, b, "layer", 1e-3)),
    "rms": ("rms", 1, lambda x, w, b: ops.row_norm(x, w, b, "rms", 1e-3)),
    "rms outside": ("rms_plus_eps", 1, lambda x, w, b: ops.row_norm(x, w, b, "rms_plus_eps", 1e-3)),
    "scale": ("scale", 1, lambda x, w, b: ops.row_norm(x, w, b, "scale", 1e-3)),
    "group": ("layer", 2, lambda x, w, b: ops.row_norm(x, w, b, "layer", 1e-3, 2)),
}


def draw(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 2 + 0.5).to(DEVICE, dtype)


def layer(x, weight, bias, eps):
    return reference.RowNorm.apply(x, weight, bias, "layer", eps, 1, kernels)


def close(got, expected, dtype=torch.float32, tolerance=0.0):
    assert got.shape == expected.shape
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < (tolerance or TOLERANCE[dtype]), f"relative error {error:.2e}"


def strided(x):
    """The same numbers as rows of a wider tensor; reading the others gives NaN."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), float("nan"))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("affine", "dtype"),
    [("weight and bias", torch.float32), ("weight", torch.bfloat16), ("none", torch.float16), ("none", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", NORMS)
def test_row_norms_and_their_gradients(name, affine, dtype):
    kind, groups, plain = NORMS[name]
    for shape in SHAPES[:2] if affine == "weight and bias" else SHAPES[:1]:
        channels_ = shape[1] - shape[1] % groups
        x = strided(draw(shape[0], channels_, dtype=dtype)).requires_grad_()
        w = None if affine == "none" else draw(1 if name == "scale" else channels_).requires_grad_()
        b = draw(channels_).requires_grad_() if affine == "weight and bias" else None
        dy = draw(*x.shape, dtype=dtype)
        inputs = [t for t in (x, w, b) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        given = iter(wide)
        xd, wd, bd = (None if t is None else next(given) for t in (x, w, b))
        y, expected = reference.RowNorm.apply(x, w, b, kind, 1e-3, groups, kernels), plain(xd, wd, bd)
        assert y.dtype == dtype
        close(y, expected, dtype)
        got = torch.autograd.grad(y, inputs, strided(dy))
        for g, e in zip(got, torch.autograd.grad(expected, wide, dy.double()), strict=True):
            close(g, e, dtype)


def test_rows_too_long_for_registers_are_left_to_others(monkeypatch):
    monkeypatch.setattr(dispatch, "LONGEST", 16)
    x = draw(3, 24)
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="16 channels"):
        ops.row_norm(x, None, None, "scale", 1e-3)
    with normkit.kernels("triton") as ran:
        ops.row_norm(x, None, None, "layer", 1e-3, 2)
    assert dict(ran) == {"triton group": 1}


def test_one_weight_for_several_groups():
    x, dy = draw(5, 24).requires_grad_(), draw(5, 24)
    w = draw(1).requires_grad_()
    y = reference.RowNorm.apply(x, w, None, "scale", 1e-3, 3, kernels)
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    expected = ops.row_norm(xd.unflatten(-1, (3, 8)), wd, None, "scale", 1e-3).flatten(-2)
    close(y, expected)
    for g, e in zip(
        torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (xd, wd), dy.double()), strict=True
    ):
        close(g, e)


def test_rows_of_zeros_and_large_means():
    x = torch.zeros(3, 40, device=DEVICE, requires_grad=True)
    for name in ("layer", "rms", "rms outside", "scale"):
        y = reference.RowNorm.apply(x, None, None, NORMS[name][0], 1e-3, 1, kernels)
        (dx,) = torch.autograd.grad(y, x, draw(3, 40))
        assert torch.equal(y, torch.zeros_like(y))
        assert dx.isfinite().all()
    x = draw(5, 37) + 1000.0
    expected = ops.row_norm(x.double(), None, None, "layer", 1e-5)
    close(layer(x, None, None, 1e-5), expected, tolerance=1e-4)  # a mean of 1000 is known to 6e-5 in float32
    assert layer(x[:0], None, None, 1e-5).shape == (0, 37)


if REAL:  # the interpreter would copy 4 GB at each launch

    def test_rows_further_apart_than_32_bits_reach():
        memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
        x, dy = (memory[start:].as_strided((3, 20), (2**30, 1)) for start in (0, 40))
        for t in (x, dy):
            t.copy_(draw(3, 20, dtype=torch.bfloat16))
        x.requires_grad_()
        near, up = x.detach().clone().requires_grad_(), dy.clone()
        (got,), (expected,) = (torch.autograd.grad(layer(t, None, None, 1e-3), t, g) for t, g in ((x, dy), (near, up)))
        assert torch.equal(got, expected)
        far, close_by = (kernels.moments(t.detach(), None, True)[0] for t in (x, near))
        assert torch.equal(far, close_by)
        pairs, coefficients = ((dy, x.detach()), (up, near.detach())), torch.cat([far, far[:1]])
        one, other = (kernels.gradient(*pair, far[0], coefficients) for pair in pairs)
        assert torch.equal(one, other)
        one, other = (kernels.gradient_sums(*pair, far[0]) for pair in pairs)
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_moments(center, masked, dtype):
    for shape in SHAPES[:3]:
        x = strided(draw(*shape, dtype=dtype) + 50)
        mask = torch.rand(shape[0], device=DEVICE) > 0.4 if masked else None
        if masked:
            x[~mask] = float("nan")  # padding must not count
        stat, count = kernels.moments(x, mask, center)
        expected, real = ops.moments(x.double(), mask, center)
        close(stat, expected)
        assert count == real
    nothing, count = kernels.moments(x, torch.zeros(len(x), dtype=torch.bool, device=DEVICE), center)
    assert count == 0
    assert not nothing.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_standardize_and_gradients_equal_the_reference(center, masked, dtype):
    n, c = SHAPES[0]
    x, dy = strided(draw(n, c, dtype=dtype)), strided(draw(n, c, dtype=dtype))
    mean, coefficients = draw(c) if center else None, draw(3, c)
    mask = torch.rand(n, device=DEVICE) > 0.4 if masked else None
    xd, dyd, md, cd = (None if t is None else t.double() for t in (x, dy, mean, coefficients))

    given = [coefficients[: 1 + center].abs(), *coefficients[:2]]
    expected = reference.standardize(xd, *(t.double() for t in given), 1e-3)
    close(kernels.standardize(x, *given, 1e-3), expected, dtype)
    close(kernels.gradient(dy, x, mean, coefficients, mask), reference.gradient(dyd, xd, md, cd, mask), dtype)
    for real in (False, True):
        found = kernels.gradient_sums(dy, x, mean, mask, real)
        close(found, reference.gradient_sums(dyd, xd, md, mask, real), tolerance=2e-5)


def test_the_same_bits_every_time():
    n, c = (8192, 768) if REAL else (40, 48)
    x, dy, w = draw(n, c), draw(n, c), draw(c).requires_grad_()
    x.requires_grad_()

    def everything():
        y = layer(x, w, None, 1e-5)
        stat, _ = kernels.moments(x.detach(), None, True)
        sums = kernels.gradient_sums(dy, x.detach(), stat[0])
        return y.detach(), *torch.autograd.grad(y, (x, w), dy), stat, sums

    first = everything()
    for _ in range(20 if REAL else 2):
        for a, b in zip(first, everything(), strict=True):
            assert torch.equal(a, b)


def test_kernels_triton_runs_triton_or_raises():
    x = draw(3, 16)
    with normkit.kernels("triton") as ran:
        assert dispatch.select(x, "layer") == "triton"
    assert dict(ran) == {"triton layer": 1}
    with pytest.raises(RuntimeError, match="float64"), normkit.kernels("triton"):
        dispatch.select(x.double(), "layer")
    with normkit.kernels("auto"):
        assert (dispatch.select(x, "layer") == "triton") == REAL


RUNNING = ["power(groups=0, warmup=1)", "power(groups=2, warmup=1)"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["batch", "un", "power(groups=2)", "pnv(affine=False)"])
def test_inference_is_one_operation_in_triton(spec, dtype):
    torch.manual_seed(0)
    norm, x = normkit.make(spec, 48).to(DEVICE).eval(), draw(5, 9, 48, dtype=dtype)
    with torch.no_grad():
        for tensor in (norm.running, *norm.parameters()):
            tensor.copy_(draw(*tensor.shape).abs() + 0.5)
        with normkit.kernels("reference"):
            expected = norm.double()(x.double())
        with normkit.kernels("triton") as ran:
            got = norm.float()(x)
    assert got.dtype is dtype
    close(got, expected, dtype)
    assert ran["triton standardize"] == 1
    assert all(name.startswith("triton") for name in ran)


def test_inference_in_forward_mode_keeps_its_derivative():
    norm, x, along = normkit.make("un", 16).to(DEVICE).eval(), draw(3, 16), draw(3, 16)
    with torch.no_grad(), normkit.kernels("triton"), fwAD.dual_level():
        norm.running.fill_(3.0)
        tangent = fwAD.unpack_dual(norm(fwAD.make_dual(x, along))).tangent
    torch.testing.assert_close(tangent, along / (3.0 + norm.eps) ** 0.5)


@pytest.mark.parametrize("spec", ["layer", "batch"])
def test_a_compiled_graph_takes_the_reference(spec):
    norm, x = normkit.make(spec, 16).to(DEVICE), draw(6, 16)
    with normkit.kernels("triton") as ran:
        y = torch.compile(norm, fullgraph=True, backend="aot_eager")(x)
    assert not ran
    with normkit.kernels("reference"):
        torch.testing.assert_close(y, normkit.make(spec, 16).to(DEVICE)(x))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", RUNNING)
def test_power_after_warmup_takes_one_pass(spec, masked):
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True] * 3 + [False]]).to(DEVICE) if masked else None
    found = []
    for choice in ("reference", "triton"):
        torch.manual_seed(0)
        norm = normkit.make(spec, 24).to(DEVICE)
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        seen, passes = [], []
        for turn in range(5):
            x, dy = draw(3, 4, 24).requires_grad_(), draw(3, 4, 24)
            if turn == 2:  # an unusable batch does not count as a step
                x = (x * float("nan")).detach().requires_grad_()
            if turn == 3:  # the warm-up begins again
                norm.load_state_dict({**norm.state_dict(), "step": torch.tensor(0)})
            with normkit.kernels(choice) as ran:
                norm.zero_grad()
                y = norm(x, mask)
                y.backward(dy)
            if REAL:
                torch.cuda.synchronize()  # so that the counter has arrived by the next step
            passes.append((ran["triton train_step on one reading"], ran["triton train_step"]))
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in norm.parameters())]
            seen += [b.clone().float() for b in norm.buffers()]
        found.append(seen)
    assert passes == [(0, 1), (1, 0), (1, 0), (0, 1), (1, 0)] or REAL
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("spec", "masked"), [(s, i % 2 == 0) for i, s in enumerate(WITH_KERNEL_RULE + WITHOUT_KERNEL_RULE + PER_TOKEN)]
)
def test_six_steps_equal_the_reference(spec, masked):
    equal_steps(spec, masked)


def equal_steps(spec, masked, prepare=lambda norm: None):
    found, width = [], 40  # two programs, one of which has channels to spare
    for choice in ("reference", "triton"):
        torch.manual_seed(0)
        norm = normkit.make(spec, width).to(DEVICE)
        if spec not in PER_TOKEN:
            assert (find_kernel_rule(norm, norm.state()) is not None) == (spec not in WITHOUT_KERNEL_RULE)
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        prepare(norm)
        found.append(several_steps(norm, draw, masked, choice))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("spec", ["un", "un(outlier_filtration=True)", "power(groups=0)"])
def test_automatic_warmup_ends_at_the_same_step(spec):
    found = []
    for choice in ("reference", "triton"):
        torch.manual_seed(0)
        norm = normkit.make(spec, 1100 if REAL else 40).to(DEVICE)
        with normkit.kernels(choice):
            for turn in range(10):
                norm(draw(8, norm.dim))
                if turn == 3:
                    norm.lag.fill_(0.16), norm.averages[2].fill_(1.0)
        found.append(norm)
    assert int(found[0].warmup_end) == int(found[1].warmup_end) > 0
    torch.testing.assert_close(found[1].averages, found[0].averages)


@pytest.mark.parametrize("spec", ["un", "un(outlier_filtration=True)", "un(window=1)", "power(groups=0)"])
def test_the_device_ends_a_warmup_whose_end_the_host_has_not_seen(spec, monkeypatch):
    monkeypatch.setattr(AsyncCounter, "at_least", lambda *_: False)  # as on a GPU that is behind, and in a CUDA graph
    equal_steps(spec, False, lambda norm: norm.warmup_end.fill_(3))


@pytest.mark.parametrize("name", NORMS)
def test_row_norms_can_be_differentiated_twice(name):
    found = []
    for choice in ("reference", "triton"):
        torch.manual_seed(1)
        x, w, b = draw(5, 8).requires_grad_(), draw(8).requires_grad_(), draw(8).requires_grad_()
        with normkit.kernels(choice) as ran:
            first = torch.autograd.grad(NORMS[name][2](x, w, b).square().sum(), (x, w, b), create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, b))])
        assert all(kind.startswith(choice) for kind in ran)
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*is deprecated")
def test_traced_operations_are_those_of_torch():
    norm, x = normkit.make("scale", 8).to(DEVICE), draw(3, 8)
    with normkit.kernels("auto") as ran:
        traced = torch.jit.trace(norm, x, check_trace=False)
    assert not any("triton" in kind for kind in ran)
    torch.testing.assert_close(traced(x), norm(x))
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="triton"):
        make_fx(norm)(x)


def test_a_lazy_sign_is_read():
    x = draw(3, 8)
    with normkit.kernels("triton"):
        close(
            ops.row_norm(torch._neg_view(x), None, None, "layer", 1e-3),
            ops.row_norm(-x, None, None, "layer", 1e-3).double(),
        )


@pytest.mark.parametrize("spec", ["rms(bias=True)", "batch"])
def test_one_gain_and_bias_for_all_channels(spec):
    norm, x, found = normkit.make(spec, 40).to(DEVICE), draw(9, 40).requires_grad_(), []
    norm.weight, norm.bias = (torch.nn.Parameter(draw(1)) for _ in range(2))
    for choice in ("reference", "triton"):
        with normkit.kernels(choice):
            y = norm(x)
            found.append([y, *torch.autograd.grad(y.pow(3).sum(), [x, norm.weight, norm.bias])])
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-4)
    norm.weight = torch.nn.Parameter(draw(39))
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="must match the existing size"):
        norm(x)


def test_subclass_with_own_rule_has_no_kernel_rule():
    class Slower(normkit.PNV):
        def average(self, batch, state):
            return super().average(batch, state) * 0.5

    for norm, has in ((normkit.PNV(4), True), (Slower(4), False), (normkit.PNV(4, sync=True), True)):
        assert (find_kernel_rule(norm, norm.state()) is not None) == has  # one process has none to wait for


def test_several_forwards_in_one_graph_keep_separate_statistics():
    x, dy = (draw(2, 5, 24) for _ in range(2))
    found = []
    for choice, recomputed in (("reference", False), ("triton", False), ("triton", True)):
        torch.manual_seed(0)
        norm = normkit.make("power(groups=0, warmup=1)", 24).to(DEVICE)
        seen = []
        for _ in range(3):
            one, two = (t.clone().requires_grad_() for t in x)
            with normkit.kernels(choice):
                if recomputed:
                    y = checkpoint(norm, one, use_reentrant=False) + 2 * checkpoint(norm, two, use_reentrant=False)
                else:
                    y = norm(one) + 2 * norm(two)
                y.backward(dy[0])
            seen += [y.detach(), one.grad, two.grad, *(b.clone() for b in norm.buffers())]
        found.append(seen)
    for a, b, c in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(b, c, atol=0, rtol=0)


@pytest.mark.parametrize("spec", ["rms", "un(warmup=1)", "power(groups=2)"])
def test_strides_are_those_of_the_input(spec):
    norm = normkit.make(spec, 8)
    x = draw(2, 8, 3, 4).requires_grad_()
    inner = (x * 1).movedim(1, -1)
    gradients = []
    inner.register_hook(lambda grad: gradients.append(grad.stride()))
    with normkit.kernels("triton") as ran:
        y = norm(inner)
        y.backward(draw(2, 3, 4, 8))
    assert all(name.startswith("triton") for name in ran)
    assert [y.stride(), *gradients] == [inner.stride()] * 2
    with torch.no_grad(), normkit.kernels("triton"):
        assert norm.eval()(inner).stride() == inner.stride()
