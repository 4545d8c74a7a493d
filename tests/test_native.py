"""What kernels for CPUs have of their own: rows, tracers, compilation; and the choice among kernels."""

import _thread
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from norm_cases import train_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import normkit
from normkit.kernels import build, dispatch, native, ops

needs_kernels = pytest.mark.skipif(bool(build.obstacle()), reason=f"no kernels here: {build.obstacle()}")
KINDS = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (7, 3), (33, 40), (300, 65), (4100, 560))  # the last bypass the caches
FINE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


def normal(*shape, kind=torch.float32):
    return (torch.randn(*shape) * 1.5 + 0.3).to(kind)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("op", "weights", "biased"), [("rms", "C", True), ("rms", "", False), ("scale", "1", False), ("scale", "C", True)]
)
def test_rows_in_any_order_of_memory(op, weights, biased, kind):
    for n, width in SHAPES:
        torch.manual_seed(0)
        x, dy = normal(width, n, kind=kind).T.requires_grad_(), normal(width, n, kind=kind).T
        weight = normal({"C": width, "1": 1}[weights]).requires_grad_() if weights else None
        bias = normal(width).requires_grad_() if biased else None
        leaves = [t for t in (x, weight, bias) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        given = iter(wide)
        args = [next(given) if t is not None else None for t in (x, weight, bias)]
        with normkit.kernels("auto") as ran:
            y = ops.row_norm(x, weight, bias, op, 1e-3)
        assert dict(ran) == {f"native {op}": 1}
        with normkit.kernels("reference"):
            expected = ops.row_norm(*args, op, 1e-3)
        assert_close(y.double(), expected, **FINE[kind])
        found, plain = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, wide, dy.double())
        assert [t.dtype for t in found] == [t.dtype for t in leaves]
        rough = {"rtol": 2e-2, "atol": 2e-2} if kind is KINDS[1] else {"rtol": 1e-4, "atol": 1e-4}
        for ours, theirs in zip(found, plain, strict=True):
            assert_close(ours.double(), theirs, **rough)


@needs_kernels
def test_halves_are_rounded_to_the_nearest_as_pytorch_does():
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.3895e38, 1e-40, -1e-40, 1.0])
    x = torch.cat([special, torch.randn(100_000 - len(special))]).bfloat16().view(-1, 50)
    scale = torch.cat([torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.0]), torch.rand(47) * 2])  # ties among them
    y = native.standardize(x, torch.ones(1, 50), scale, None, 0.0)
    expected = (x.float() * scale).bfloat16()
    assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_tracers_and_counters_find_every_operation():
    x = torch.randn(4, 6)
    with normkit.kernels("auto") as ran, FlopCounterMode(display=False):
        ops.row_norm(x, None, None, "rms", 1e-5)
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
    def run(norm):
        torch.manual_seed(0)
        x, dy = (torch.randn(9, 6, dtype=torch.float32, device="cpu") for _ in range(2))
        steps = [train_step(norm, x, dy) for _ in range(3)]
        return [value for step in steps for value in step.values()]

    norm, twin = normkit.make(spec, 6), normkit.make(spec, 6)
    expected = run(norm)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        found = run(twin)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
def test_invalid_arguments_of_c_kernels_raise():
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="weight"):
        ops.row_norm(x, torch.ones(6, device="meta"), None, "rms", 1e-5)
    norm = normkit.make("un", 6)
    norm.window_x = norm.window_x.double()
    with pytest.raises(RuntimeError, match="window"):
        norm(x)
    assert norm.step == 0


# -- compilation, by a script in place of a compiler -------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Return a function that sets what the compiler does; nothing is compiled or loaded yet."""
    if sys.platform != "linux":
        pytest.skip("kernels are compiled on Linux")
    loaded, script = [], tmp_path / "a compiler"

    def does(body):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", f"'{script}' -v")
        build.obstacle.cache_clear()
        return loaded

    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    yield does
    build.obstacle.cache_clear()


WRITES = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


def test_a_library_is_made_once_where_others_cannot_write(compiler, tmp_path):
    loaded, folder = compiler(WRITES), tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build.is_loaded()
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    for _ in range(2):
        build.obstacle.cache_clear()
        assert build.is_loaded()
    assert loaded[1:] == [str(path) for path in folder.glob("*.so")] * 2
    compiler("exit 1")
    assert build.is_loaded(), "it is compiled already"


@pytest.mark.parametrize("spec", ["batch", "rms", "power(groups=2)"])
def test_without_a_compiler_plain_operations_run(spec, compiler, monkeypatch):
    compiler("exit 1")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "g++" in build.obstacle()
    with normkit.kernels("auto") as ran:
        normkit.make(spec, 4)(torch.randn(8, 4))
    assert ran
    assert all(name.startswith("reference") for name in ran)
    with pytest.raises(RuntimeError, match="native"), normkit.kernels("native"):
        pass


def test_a_compiler_that_fails_is_quoted(compiler, tmp_path):
    loaded = compiler("echo 'no such flag: -O3' >&2; exit 1")
    with pytest.warns(RuntimeWarning, match="-O3"):
        assert not build.is_loaded()
    assert loaded == []
    assert {path.suffix for path in (tmp_path / "cache" / "native").iterdir()} == {".lock"}


def test_a_user_without_a_home_gets_a_warning_and_slower_code(compiler, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    compiler(WRITES)
    monkeypatch.delenv("NORMKIT_CACHE")
    monkeypatch.setattr(build.Path, "home", home)
    with pytest.warns(RuntimeWarning, match="NORMKIT_CACHE"):
        assert not build.is_loaded()
    assert "no home folder" in build.obstacle()


def test_processes_that_start_together_compile_once(tmp_path, monkeypatch):
    compiled = []

    def slowly(command, path):
        time.sleep(0.2)
        compiled.append(path)
        path.touch()

    monkeypatch.setattr(build, "_compile", slowly)
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:  # locks of threads that open a file each are as those of processes
        found = list(pool.map(lambda _: build._compiled(["g++"], []), range(4)))
    assert found == compiled * 4
    assert len(compiled) == 1


# -- the choice: environment, threads, backward passes -----------------------------------------------------------------


def test_the_environment_chooses(monkeypatch):
    x = torch.ones(2, 4)
    for choice, kind in (("reference", "reference"), ("native", "native" if build.is_loaded() else "reference")):
        monkeypatch.setattr(dispatch, "ENVIRONMENT", choice)
        assert dispatch.select(x, "rms") == kind
    monkeypatch.setattr(dispatch, "ENVIRONMENT", "fastest")
    with pytest.raises(ValueError, match="NORMKIT_KERNELS"):
        ops.row_norm(x, None, None, "rms", 0.0)
    with pytest.raises(ValueError, match="cuda"), normkit.kernels("cuda"):
        pass
    with normkit.kernels("reference") as ran:
        assert dispatch.select(x, "layer") == "reference"
        with normkit.kernels("auto"):
            assert dispatch.select(x, "layer", has_native=False) == "reference"
    assert dict(ran) == {"reference layer": 2}


def test_a_choice_holds_in_its_own_thread():
    inside, found = threading.Barrier(2), {}

    def run(choice):
        with normkit.kernels(choice):
            inside.wait()  # both blocks are open at once
            found[choice] = dispatch.current_choice()
            inside.wait()

    threads = [threading.Thread(target=run, args=(choice,)) for choice in ("reference", "auto")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"reference": "reference", "auto": "auto"}


def test_a_thread_of_autograd_takes_the_choice_of_the_block_around_the_backward_pass():
    seen, done = [], threading.Event()

    def recompute():  # as autograd's threads on a GPU, Python did not start this one
        seen.append(dispatch.current_choice())
        done.set()

    with normkit.kernels("reference"):
        _thread.start_new_thread(recompute, ())
        assert done.wait(10)
        own = threading.Thread(target=recompute)
        own.start()
        own.join()
    assert seen == ["reference", "auto"], "a thread of Python has blocks of its own"
    assert not dispatch._entered


def test_small_inputs_on_a_gpu_take_kernels_of_torch(monkeypatch):
    with FakeTensorMode(), normkit.kernels("auto") as ran:
        x, w = torch.empty(8, 32, device="cuda"), torch.empty(32, device="cuda")
        ops.row_norm(x, w, w, "layer", 1e-5)
        ops.row_norm(x, w, None, "rms", 1e-5)
        assert dict(ran) == {"torch layer": 1, "torch rms": 1}
        half = x.bfloat16()
        assert dispatch.has_torch_kernel(half, w.bfloat16())
        assert not dispatch.has_torch_kernel(half, w), "PyTorch's kernels take one type"
        assert not dispatch.has_torch_kernel(x, torch.empty(1, device="cuda")), "and a weight for each channel"
        assert not dispatch.has_torch_kernel(torch.empty(dispatch.SMALL // 8, 16, device="cuda"))
        assert dispatch.has_torch_kernel(torch.empty(dispatch.SMALL // 8, dispatch.LONGEST + 1, device="cuda"))
        assert not dispatch.has_torch_kernel(torch.empty(0, 32, device="cuda"))
        with monkeypatch.context() as patch:  # a compiled graph would hold for these sizes alone
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert not dispatch.has_torch_kernel(x, w)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert dispatch.has_torch_kernel(x, w)
        assert not dispatch.has_torch_kernel(half, w.bfloat16()), "under autocast they give float32"
        with normkit.kernels("reference") as plain:
            ops.row_norm(x, w, w, "layer", 1e-5)
        assert dict(plain) == {"reference layer": 1}
