"""Kernels against the reference: those for CPUs, and Triton's in a process of `test_triton.py`."""

import os
import weakref

import pytest
import torch
from norm_cases import PER_TOKEN, WITH_KERNEL_RULE, WITHOUT_KERNEL_RULE, equal_steps, two_forwards_a_step
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.kernels import build, dispatch, ops
from normkit.kernels.rule import find_kernel_rule

TRITON = "NORMKIT_TEST_TRITON" in os.environ
REAL = TRITON and not dispatch.is_interpreted()
BY, DEVICE = "triton" if TRITON else "native", "cuda" if REAL else "cpu"
if TRITON and not REAL:
    import triton_driver

    triton_driver.install()
pytestmark = [
    pytest.mark.skipif(not TRITON and bool(build.obstacle()), reason=f"no kernels here: {build.obstacle()}"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # triton 3.6's own
]
NODE = "torch::autograd::CppNode<(anonymous namespace)::Step>"
if REAL:
    SHAPES = ((4099, 512), (777, 4096), (257, 8100))
else:  # the last bypass the caches
    SHAPES = ((7, 37), (64, 384), (33, 64)) if TRITON else ((1, 1), (7, 3), (33, 40), (300, 65), (4100, 560))
DTYPES = (torch.float32, torch.bfloat16)
ROUGH = {torch.float32: {"rtol": 2e-4, "atol": 2e-4}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


def draw(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 1.5 + 0.3).to(DEVICE, dtype)


def equal_to_the_reference(run, tolerance):
    """Compare what `run` returns with these kernels and with the reference."""
    found = []
    for choice in (BY, "reference"):
        torch.manual_seed(0)
        with normkit.kernels(choice):
            found.append(run())
    for ours, plain in zip(*found, strict=True):
        assert ours.dtype is plain.dtype
        assert (ours.double() - plain.double()).norm() <= tolerance * (plain.double().norm() + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "spec", ["batch", "pnv", "renorm", "power(warmup=1)", "power(groups=7, warmup=1)", "power(groups=0)"]
)
def test_steps_of_many_shapes(spec, masked, dtype):
    for n, width in SHAPES[:1] if TRITON else SHAPES if spec == "batch" else SHAPES[:-1]:
        if width % 7 and "7" in spec:
            continue
        found = []
        for choice, wide in ((BY, dtype), ("reference", torch.float64)):
            torch.manual_seed(0)
            norm, seen = normkit.make(spec, width).to(DEVICE, torch.promote_types(wide, torch.float32)), []
            for _ in range(2):
                x = draw(n, width, dtype=dtype).to(wide).requires_grad_()
                mask = torch.rand(n).to(DEVICE) < 0.6 if masked else None
                with normkit.kernels(choice):
                    y = norm(x, mask)
                    y.backward(draw(n, width, dtype=dtype).to(wide))
                seen += [y, x.grad, norm.running]
            found.append(seen)
        for ours, plain in zip(*found, strict=True):
            assert_close(ours.double(), plain, **ROUGH[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", ["batch", "un", "power(groups=2)", "pnv(affine=False)"])
def test_inference_is_one_operation(spec, dtype):
    norm, x = normkit.make(spec, 48).to(DEVICE).eval(), draw(5, 9, 48, dtype=dtype)
    with torch.no_grad():
        for tensor in (norm.running, *norm.parameters()):
            tensor.copy_(draw(*tensor.shape).abs() + 0.5)
        with normkit.kernels("reference"):
            expected = norm.double()(x.double())
        with normkit.kernels(BY) as ran:
            found = norm.float()(x)
    assert found.dtype is dtype
    assert_close(found.double(), expected, **ROUGH[dtype])
    assert ran[f"{BY} standardize"] == 1
    assert all(name.startswith(BY) for name in ran)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", ["power(warmup=0)", "un", "rms", "scale"])
def test_the_same_bits_every_time_and_on_any_number_of_threads(spec, dtype):
    before, found, rows = torch.get_num_threads(), [], 40 if TRITON and not REAL else 1500
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            norm, seen = normkit.make(spec, 64).to(DEVICE), []
            with normkit.kernels(BY):
                for _ in range(2):
                    x = draw(rows, 64, dtype=dtype).requires_grad_()
                    norm(x).backward(draw(rows, 64, dtype=dtype))
                    seen.append(x.grad)
            found.append([*seen, *(p.grad for p in norm.parameters()), *norm.buffers()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


SPECS = WITH_KERNEL_RULE + WITHOUT_KERNEL_RULE + PER_TOKEN


@pytest.mark.parametrize(
    ("spec", "masked"),
    [(spec, m) for n, spec in enumerate(SPECS) for m in (False, True) if not TRITON or m == (n % 2 == 0)],
)
def test_six_steps_equal_the_reference(spec, masked):
    norm = normkit.make(spec, 40)
    if spec not in PER_TOKEN:
        assert (find_kernel_rule(norm, norm.state()) is not None) == (spec not in WITHOUT_KERNEL_RULE)
    equal_steps(spec, masked, BY, draw)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("spec", ["power(groups=2, warmup=1)", "un(window=2, warmup=1)", "batch"])
def test_several_forwards_in_one_graph_keep_separate_statistics(spec, recomputed):
    found, plain = (two_forwards_a_step(spec, *how, draw) for how in ((BY, recomputed), ("reference", False)))
    assert_close(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec", ["power(groups=2, warmup=1)", "un(window=2, warmup=1, outlier_filtration=True)", "batch"]
)
@pytest.mark.parametrize("first", [BY, "reference"])
def test_a_forward_is_recomputed_by_another_implementation(spec, first):
    plain, rerun = (normkit.make(spec, 40).to(DEVICE) for _ in range(2))
    other = "reference" if first == BY else BY
    for turn in range(4):
        torch.manual_seed(turn)
        x, mask = draw(6, 5, 40), torch.rand(5, 6, device=DEVICE).T > 0.2  # a mask in another order of memory
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        plain(leaves[0], mask).square().sum().backward()
        with normkit.kernels(first):
            y = checkpoint(rerun, leaves[1], mask, use_reentrant=True)
        with normkit.kernels(other):
            y.square().sum().backward()
        assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-4, atol=1e-4)
    assert_close(dict(rerun.named_buffers()), dict(plain.named_buffers()), rtol=1e-4, atol=1e-4)


def test_decisions_end_with_their_graph():
    norm, masks = normkit.make("un(window=2)", 40).to(DEVICE), []
    with normkit.kernels(BY):
        for turn in range(3):
            torch.manual_seed(turn)
            mask = torch.rand(6, 5, device=DEVICE) > 0.2
            y = norm(draw(6, 5, 40).requires_grad_(), mask)
            masks.append(weakref.ref(mask))
            del mask
            assert masks[-1]() is not None, "a recomputed forward needs it"
    del y
    assert [each() is None for each in masks] == [True, True, False]


@pytest.mark.parametrize("spec", ["un", "un(outlier_filtration=True)", "power(groups=0)"])
def test_automatic_warmup_ends_at_the_same_step(spec):
    found = []
    for choice in ("reference", BY):
        torch.manual_seed(0)
        norm = normkit.make(spec, 1100 if REAL else 40).to(DEVICE)
        with normkit.kernels(choice):
            for turn in range(10):
                norm(draw(8, norm.dim))
                if turn == 3:
                    norm.lag.fill_(0.16), norm.averages[2].fill_(1.0)
        found.append(norm)
    assert int(found[0].warmup_end) == int(found[1].warmup_end) > 0
    assert_close(found[1].averages, found[0].averages)


def test_power_after_its_warmup_reads_its_input_once():
    norm, passes = normkit.make("power(groups=0, warmup=1)", 24).to(DEVICE), []
    for turn in range(4):
        if turn == 2:  # the warm-up begins again
            norm.load_state_dict({**norm.state_dict(), "step": torch.tensor(0)})
        with normkit.kernels(BY) as ran:
            norm(draw(12, 24).requires_grad_()).backward(draw(12, 24))
        if REAL:
            torch.cuda.synchronize()  # so that the counter has arrived by the next step
        passes.append(dict(ran))
    whole, one = {f"{BY} train_step": 1}, {f"{BY} train_step on one reading": 1}
    assert passes == [whole, one, whole, one] or REAL


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", ["batch", "un(window=2, warmup=1)"])
def test_parameters_of_every_type_train_in_one_call_if_they_are_no_wider(spec, kind):
    if TRITON and kind is torch.float64:
        return
    dtype = torch.float16 if TRITON and kind is torch.float16 else torch.bfloat16

    def run():
        norm, seen = normkit.make(spec, 24).to(DEVICE, kind), []
        norm.running = norm.running.float()
        for _ in range(3):
            x = draw(70, 24, dtype=dtype).requires_grad_()
            y = norm(x)
            y.backward(draw(70, 24, dtype=dtype))
            seen += [y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()]
        assert (y.grad_fn.name() == NODE) == (kind is not torch.float64 and dispatch.current_choice() == BY)
        return seen

    equal_to_the_reference(run, 1e-2)


def test_rows_and_gradients_that_are_not_aligned_or_not_contiguous():
    def run():
        norm, seen = normkit.make("batch", 16).to(DEVICE), []
        layouts = (
            lambda: draw(4 * 16 + 1)[1:].view(4, 16), lambda: draw(16, 4).t(), lambda: draw(4, 20)[:, 3:19],
        )  # fmt: skip
        for x in layouts:
            for dy in (*layouts, lambda: draw(1).expand(4, 16)):
                leaf = x().requires_grad_()
                y = norm(leaf)
                y.backward(dy())
                seen += [y.detach(), leaf.grad]
        return seen

    equal_to_the_reference(run, 1e-5)


@pytest.mark.parametrize("spec", ["pnv(bias=False)", "batch", "un", "power(groups=2)", "rms(bias=True)"])
def test_one_gain_and_bias_for_all_channels(spec):
    def run():
        norm, x = normkit.make(spec, 40).to(DEVICE), draw(9, 40).requires_grad_()
        for key in [key for key in ("weight", "bias") if getattr(norm, key) is not None]:
            setattr(norm, key, torch.nn.Parameter(draw(1)))
        y = norm(x)
        y.backward(draw(9, 40))
        return [y.detach(), x.grad, *(p.grad for p in norm.parameters())]

    equal_to_the_reference(run, 1e-5)


def test_inference_mode_and_negative_views():
    x, norm = draw(9, 6), normkit.make("un(window=2, warmup=1)", 6).to(DEVICE)
    with normkit.kernels(BY):
        with torch.inference_mode():
            norm(x)
        assert norm.step == 1
        negative = torch._neg_view(x)
        assert_close(ops.row_norm(negative, None, None, "rms", 1e-5), -ops.row_norm(x, None, None, "rms", 1e-5))
        assert_close(norm.eval()(negative), norm(-x))
