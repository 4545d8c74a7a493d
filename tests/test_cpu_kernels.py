"""Kernels for CPUs, in C++ and of PyTorch, against plain operations in float64."""

import pytest
import torch
from norm_cases import PER_TOKEN, WITH_KERNEL_RULE, WITHOUT_KERNEL_RULE, several_steps
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import normkit
from normkit.kernels import aten, build, native, ops, reference

needs_kernels = pytest.mark.skipif(bool(build.obstacle()), reason=f"no kernels here: {build.obstacle()}")
KINDS = (torch.float32, torch.bfloat16)
NODE = "torch::autograd::CppNode<(anonymous namespace)::Step>"
SHAPES = ((1, 1), (7, 3), (33, 40), (300, 65), (4100, 560))  # the last bypass the caches
FINE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


def normal(*shape, kind=torch.float32):
    return (torch.randn(*shape) * 1.5 + 0.3).to(kind)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_columns(kind, center, masked):
    for n, width in ((0, 3), *SHAPES):
        torch.manual_seed(0)
        x, dy = normal(n, width, kind=kind), normal(n, width, kind=kind)
        mask = torch.rand(n) < 0.6 if masked else None
        mean, weight, bias = normal(3, width).unbind(0)
        mean = mean if center else None
        stat, count = aten.moments(x, mask, center, torch.float32)
        expected, real = reference.moments(x.double(), mask, center)
        assert (stat.dtype, count.item()) == (torch.float32, real.item())
        assert_close(stat.double(), expected, rtol=2e-5, atol=2e-5)
        for real in (False, True):
            sums = aten.gradient_sums(dy, x, mean, mask, real, torch.float32)
            expected = reference.gradient_sums(dy.double(), x.double(), mean, mask, real)
            assert_close(sums.double(), expected, rtol=1e-4, atol=1e-4)
        if n:
            expected = reference.standardize(x.double(), stat, weight, bias, 1e-3)
            for module in (aten, native) if build.is_loaded() else (aten,):
                assert_close(module.standardize(x, stat, weight, bias, 1e-3).double(), expected, **FINE[kind])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", ["batch", "pnv", "power(warmup=1)", "power(groups=7, warmup=1)", "power(groups=0)"])
def test_steps_of_many_shapes(spec, masked, kind):
    for n, width in SHAPES:
        if width % 7 and "7" in spec:
            continue
        found = []
        for choice, wide in (("native", kind), ("reference", torch.float64)):
            torch.manual_seed(0)
            norm, seen = normkit.make(spec, width).to(torch.promote_types(wide, torch.float32)), []
            for _ in range(2):
                x = normal(n, width, kind=kind).to(wide).requires_grad_()
                mask = torch.rand(n) < 0.6 if masked else None
                with normkit.kernels(choice):
                    y = norm(x, mask)
                    y.backward(normal(n, width, kind=kind).to(wide))
                seen += [y, x.grad, norm.running]
            norm.eval()
            with torch.no_grad(), normkit.kernels(choice):
                seen.append(norm(x))
            found.append(seen)
        rough = {"rtol": 3e-2, "atol": 3e-2} if kind is KINDS[1] else {"rtol": 2e-4, "atol": 2e-4}
        for ours, plain in zip(*found, strict=True):
            assert_close(ours.double(), plain, **rough)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("op", "weights"), [("rms", "C"), ("rms", ""), ("scale", "1"), ("scale", "C"), ("scale", "")])
@pytest.mark.parametrize("by", ["native", "aten"])
def test_rows_in_any_order_of_memory(op, weights, biased, kind, by, monkeypatch):
    monkeypatch.setattr(build, "is_loaded", lambda: by == "native")
    for n, width in SHAPES:
        torch.manual_seed(0)
        x, dy = normal(width, n, kind=kind).T.requires_grad_(), normal(width, n, kind=kind).T
        weight = normal({"C": width, "1": 1, "": 0}[weights]).requires_grad_() if weights else None
        bias = normal(width).requires_grad_() if biased else None
        leaves = [t for t in (x, weight, bias) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        given = iter(wide)
        args = [next(given) if t is not None else None for t in (x, weight, bias)]
        with normkit.kernels("auto") as ran:
            y = getattr(ops, op)(x, weight, bias, 1e-3)
        assert dict(ran) == {f"{by} {op}": 1}
        with normkit.kernels("reference"):
            expected = getattr(ops, op)(*args, 1e-3)
        assert_close(y.double(), expected, **FINE[kind])
        found, plain = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, wide, dy.double())
        assert [t.dtype for t in found] == [t.dtype for t in leaves]
        for ours, theirs in zip(found, plain, strict=True):
            assert_close(
                ours.double(), theirs, rtol=2e-2 if kind is KINDS[1] else 1e-4, atol=2e-2 if kind is KINDS[1] else 1e-4
            )


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["power(warmup=0)", "power(groups=0, warmup=0)", "un", "batch", "rms", "scale"])
def test_the_same_bits_on_any_number_of_threads(spec, kind):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            norm, seen = normkit.make(spec, 64), []
            with normkit.kernels("native"):
                for _ in range(2):
                    x = normal(1500, 64, kind=kind).requires_grad_()
                    norm(x).backward(normal(1500, 64, kind=kind))
                    seen.append(x.grad)
            found.append([*seen, *(p.grad for p in norm.parameters()), *norm.buffers()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernels
def test_halves_are_rounded_to_the_nearest_as_pytorch_does():
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.3895e38, 1e-40, -1e-40, 1.0])
    x = torch.cat([special, torch.randn(100_000 - len(special))]).bfloat16().view(-1, 50)
    scale = torch.cat([torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.0]), torch.rand(47) * 2])  # ties among them
    y = native.standardize(x, torch.ones(1, 50), scale, None, 0.0)
    expected = (x.float() * scale).bfloat16()
    assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_the_variance_survives_a_mean_far_from_zero(choice, masked):
    torch.manual_seed(0)
    x, mask = torch.randn(5000, 8) + 1e4, torch.rand(5000) < 0.5 if masked else None
    norm = normkit.make("batch(alpha=0, running_var=biased)", 8)
    with normkit.kernels(choice):
        norm(x, mask)
        assert_close(ops.moments(x, mask, True)[0], norm.running, rtol=1e-4, atol=1e-4)
    assert_close(norm.running.double(), reference.moments(x.double(), mask, True)[0], rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", WITH_KERNEL_RULE + WITHOUT_KERNEL_RULE + PER_TOKEN)
def test_six_steps_equal_the_reference(spec, masked):
    found = []
    for choice in ("reference", "native"):
        torch.manual_seed(0)
        norm = normkit.make(spec, 40)
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        found.append(several_steps(norm, normal, masked, choice))
    for ours, plain in zip(*found[::-1], strict=True):
        assert_close(ours, plain, atol=3e-5, rtol=3e-5, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("spec", ["power(groups=2, warmup=1)", "un(window=2, warmup=1)", "batch"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_several_forwards_in_one_graph_keep_separate_statistics(spec, recomputed):
    found = []
    for choice, again in (("reference", False), ("native", recomputed)):
        torch.manual_seed(0)
        norm, seen = normkit.make(spec, 24), []
        with normkit.kernels(choice):
            for _ in range(3):
                one, two = (normal(5, 24).requires_grad_() for _ in range(2))
                parts = [checkpoint(norm, x, use_reentrant=False) if again else norm(x) for x in (one, two)]
                (parts[0] + 2 * parts[1]).backward(normal(5, 24))
                seen += [one.grad, two.grad]
        found.append([*seen, *(p.grad for p in norm.parameters()), *norm.buffers()])
    assert_close(*found[::-1], rtol=1e-4, atol=1e-4)


@needs_kernels
def test_tracers_and_counters_find_every_operation():
    x = torch.randn(4, 6)
    with normkit.kernels("auto") as ran, FlopCounterMode(display=False):
        ops.rms(x, None, None, 1e-5)
    assert not [name for name in ran if name.startswith("native")]
    norm = normkit.make("batch", 6).eval()
    graph = make_fx(norm)(x)
    assert_close(graph(x + 1), norm(x + 1))


@needs_kernels
@pytest.mark.parametrize("spec", ["rms", "scale", "batch"])
def test_forward_mode_differentiation_goes_by_pytorch(spec):
    norm, x, tangent = normkit.make(spec, 6).eval().requires_grad_(False), torch.randn(4, 6), torch.randn(4, 6)
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, tangent))).tangent
    assert_close(found, torch.func.jvp(norm, (x,), (tangent,))[1])


@needs_kernels
@pytest.mark.parametrize("spec", ["rms", "scale", "un(window=2, warmup=1)", "power(groups=2, warmup=1)", "renorm"])
def test_pytorch_defaults_do_not_matter(spec):
    def run():
        torch.manual_seed(0)
        x, dy = (torch.randn(9, 6, dtype=torch.float32, device="cpu") for _ in range(2))
        seen = []
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            y = norm(leaf)
            seen += [y.detach(), *torch.autograd.grad(y, [leaf, *norm.parameters()], dy)]
        return [*seen, *norm.buffers()]

    norm = normkit.make(spec, 6)
    expected, norm = run(), normkit.make(spec, 6)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        found = run()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
def test_inference_mode_and_negative_views():
    x = torch.randn(9, 6)
    norm = normkit.make("un(window=2, warmup=1)", 6)
    with torch.inference_mode():
        norm(x)
    assert norm.step == 1
    negative = torch._neg_view(x)
    assert_close(ops.rms(negative, None, None, 1e-5), -ops.rms(x, None, None, 1e-5))
    assert_close(norm.eval()(negative), norm(-x))


@needs_kernels
def test_invalid_arguments_of_c_kernels_raise():
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="weight"):
        ops.rms(x, torch.ones(6, device="meta"), None, 1e-5)
    norm = normkit.make("un", 6)
    norm.window_x = norm.window_x.double()
    with pytest.raises(RuntimeError, match="window"):
        norm(x)
    assert norm.step == 0


@needs_kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", ["batch", "un(window=2, warmup=1)"])
def test_parameters_of_every_type_train_in_one_call_if_they_are_no_wider(spec, kind):
    found = []
    for choice in ("reference", "native"):
        torch.manual_seed(0)
        norm, seen = normkit.make(spec, 24).to(kind), []
        norm.running = norm.running.float()
        for _ in range(3):
            x = normal(9, 24, kind=torch.bfloat16).requires_grad_()
            with normkit.kernels(choice):
                y = norm(x)
                y.backward(normal(9, 24, kind=torch.bfloat16))
            seen += [y.detach(), x.grad, norm.weight.grad, norm.bias.grad]
        found.append(seen)
    assert (y.grad_fn.name() == NODE) == (kind is not torch.float64)
    for ours, plain in zip(*found[::-1], strict=True):
        assert ours.dtype is plain.dtype
        assert_close(ours.double(), plain.double(), rtol=3e-2, atol=3e-2)


@needs_kernels
def test_power_after_its_warmup_reads_its_input_once():
    norm, x = normkit.make("power(groups=0, warmup=1)", 6), torch.randn(4, 6, requires_grad=True)
    with normkit.kernels("native") as ran:
        norm(x).sum().backward()
        norm(x).sum().backward()
    assert dict(ran) == {"native train_step": 1, "native train_step on one reading": 1}
