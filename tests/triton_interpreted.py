"""What Triton's kernels have of their own: rows of any kind, launches, and cases that go to others.

`test_triton.py` runs this file and `test_kernels.py` in a child process where Triton interprets kernels on the CPU, and
on a CUDA device once more without the interpreter, at real sizes.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import triton_driver
from norm_cases import equal_steps
from test_kernels import DEVICE, REAL, SHAPES, draw
from torch.fx.experimental.proxy_tensor import make_fx

import normkit
from normkit.kernels import dispatch, ops, reference
from normkit.kernels import triton as kernels
from normkit.kernels.async_counter import AsyncCounter
from normkit.kernels.rule import find_kernel_rule

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # triton 3.6's own
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def strided(x):
    """The same numbers as rows of a wider tensor; reading the others gives NaN."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), float("nan"))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def scale_in_groups(x, weight, bias):
    y = ops.row_norm(x.unflatten(-1, (3, -1)), weight, None, "scale", 1e-3).flatten(-2)
    return y if bias is None else y + bias


NORMS = {  # name -> (kernel kind, groups, the reference)
    "layer": ("layer", 1, lambda x, w, b: ops.row_norm(x, w, b, "layer", 1e-3)),
    "rms": ("rms", 1, lambda x, w, b: ops.row_norm(x, w, b, "rms", 1e-3)),
    "rms outside": ("rms_plus_eps", 1, lambda x, w, b: ops.row_norm(x, w, b, "rms_plus_eps", 1e-3)),
    "scale": ("scale", 1, lambda x, w, b: ops.row_norm(x, w, b, "scale", 1e-3)),
    "scale in groups": ("scale", 3, scale_in_groups),
    "group": ("layer", 2, lambda x, w, b: ops.row_norm(x, w, b, "layer", 1e-3, 2)),
}


def layer(x, weight, bias, eps):
    return reference.NormalizeRows.apply(x, weight, bias, "layer", eps, 1, kernels)


def close(got, expected, dtype=torch.float32, tolerance=0.0):
    assert got.shape == expected.shape
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < (tolerance or TOLERANCE[dtype]), f"relative error {error:.2e}"


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
        w = None if affine == "none" else draw(1 if kind == "scale" else channels_).requires_grad_()
        b = draw(channels_).requires_grad_() if affine == "weight and bias" else None
        dy = draw(*x.shape, dtype=dtype)
        inputs = [t for t in (x, w, b) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        given = iter(wide)
        xd, wd, bd = (None if t is None else next(given) for t in (x, w, b))
        y, expected = reference.NormalizeRows.apply(x, w, b, kind, 1e-3, groups, kernels), plain(xd, wd, bd)
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


def test_rows_of_zeros_and_large_means():
    x = torch.zeros(3, 40, device=DEVICE, requires_grad=True)
    for name in ("layer", "rms", "rms outside", "scale"):
        y = reference.NormalizeRows.apply(x, None, None, NORMS[name][0], 1e-3, 1, kernels)
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


def test_kernels_triton_runs_triton_or_raises():
    x = draw(3, 16)
    with normkit.kernels("triton") as ran:
        assert dispatch.select(x, "layer") == "triton"
    assert dict(ran) == {"triton layer": 1}
    with pytest.raises(RuntimeError, match="float64"), normkit.kernels("triton"):
        dispatch.select(x.double(), "layer")
    with normkit.kernels("auto"):
        assert (dispatch.select(x, "layer") == "triton") == REAL


def test_a_compiled_graph_takes_the_reference():
    norm, x = normkit.make("batch", 16).to(DEVICE), draw(6, 16)
    with normkit.kernels("triton") as ran:
        y = torch.compile(norm, fullgraph=True, backend="aot_eager")(x)
    assert not ran
    with normkit.kernels("reference"):
        torch.testing.assert_close(y, normkit.make("batch", 16).to(DEVICE)(x))


@pytest.mark.parametrize("spec", ["un", "un(outlier_filtration=True)", "un(window=1)", "power(groups=0)"])
def test_the_device_ends_a_warmup_whose_end_the_host_has_not_seen(spec, monkeypatch):
    monkeypatch.setattr(AsyncCounter, "at_least", lambda *_: False)  # as on a GPU that is behind, and in a CUDA graph
    equal_steps(spec, False, "triton", draw, lambda norm: norm.warmup_end.fill_(3))


@pytest.mark.parametrize("name", ["layer", "rms", "rms outside", "scale", "group"])
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
def test_tracers_get_operations_of_torch_and_forward_mode_its_derivative():
    norm, x, along = normkit.make("scale", 8).to(DEVICE), draw(3, 8), draw(3, 8)
    with normkit.kernels("auto") as ran:
        traced = torch.jit.trace(norm, x, check_trace=False)
    assert not any("triton" in kind for kind in ran)
    torch.testing.assert_close(traced(x), norm(x))
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="triton"):
        make_fx(norm)(x)
    un = normkit.make("un", 8).to(DEVICE).eval()
    with torch.no_grad(), normkit.kernels("triton"), fwAD.dual_level():
        tangent = fwAD.unpack_dual(un(fwAD.make_dual(x, along))).tangent
    torch.testing.assert_close(tangent, along / (1.0 + un.eps) ** 0.5)


def test_subclass_with_own_rule_has_no_kernel_rule():
    class Slower(normkit.PNV):
        def average(self, batch, state):
            return super().average(batch, state) * 0.5

    for norm, has in ((normkit.PNV(4), True), (Slower(4), False), (normkit.PNV(4, sync=True), True)):
        assert (find_kernel_rule(norm, norm.state()) is not None) == has  # one process has none to wait for


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


# -- training steps that C++ launches: types, layouts and failures ---------------------------------------------------


def test_a_norm_on_another_device_raises():
    norm = normkit.make("batch", 8).to("meta")
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="weight"):
        norm(draw(4, 8))


@pytest.mark.skipif(REAL, reason="a device whose driver fails cannot go on")
def test_a_failing_launch_raises(monkeypatch, capfd):
    norm = normkit.make("batch", 8)
    with normkit.kernels("triton"):
        norm(draw(4, 8))
        monkeypatch.setattr(triton_driver, "kernels", {})
        with pytest.raises(RuntimeError, match="cuLaunchKernel"):
            norm(draw(4, 8))
    assert "KeyError" in capfd.readouterr().err
