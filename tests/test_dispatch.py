"""The choice of kernels: environment, threads, backward passes, imports."""

import _thread
import os
import subprocess
import sys
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import normkit
from normkit.kernels import build, dispatch, ops


def run_with_choice(choice):
    code = """import torch
from normkit.kernels import dispatch, ops
x = torch.ones(2, 4)
ops.rms(x, None, None, 0.0)
print(dispatch.select(x, "rms"), dispatch.current_choice())
"""
    environment = os.environ | {"NORMKIT_KERNELS": choice}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_chooses():
    done = run_with_choice("reference")
    assert (done.returncode, done.stdout) == (0, "reference reference\n")
    done = run_with_choice("fastest")
    assert done.returncode == 1
    assert "NORMKIT_KERNELS" in done.stderr
    assert "native" in dispatch.CHOICES


def test_the_environment_is_read_when_an_op_runs(monkeypatch):
    x = torch.ones(2, 4)
    for choice, kind in (("reference", "reference"), ("native", "native" if build.is_loaded() else "reference")):
        monkeypatch.setenv("NORMKIT_KERNELS", choice)
        assert dispatch.select(x, "rms") == kind


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
        ops.layer(x, w, w, 1e-5)
        ops.rms(x, w, None, 1e-5)
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
            ops.layer(x, w, w, 1e-5)
        assert dict(plain) == {"reference layer": 1}
