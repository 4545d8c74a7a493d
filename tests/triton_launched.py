"""Training steps that C++ launches: types, layouts, checkpoints and failures.

`triton_interpreted.py` compares their results with the reference. `test_triton.py` runs both files, in the interpreter
and on a CUDA device.
"""

import pytest
import torch
import triton_driver
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.kernels import dispatch

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # triton 3.6's own
REAL = not dispatch.is_interpreted()
DEVICE = "cuda" if REAL else "cpu"
if not REAL:
    triton_driver.install()
NODE = "torch::autograd::CppNode<(anonymous namespace)::Step>"


def draw(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 2 + 0.5).to(DEVICE, dtype)


def equal_to_the_reference(run, tolerance=1e-5):
    """Compare what `run` returns where C++ launches with the reference."""
    found = []
    for choice in ("reference", "triton"):
        torch.manual_seed(0)
        with normkit.kernels(choice):
            found.append(run())
    for a, b in zip(*found, strict=True):
        assert a.dtype is b.dtype
        assert (a.double() - b.double()).norm() <= tolerance * (a.double().norm() + 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_with_parameters_of_either_type(dtype, kind):
    def run():
        norm, seen = normkit.make("un(window=2, warmup=1)", 48).to(DEVICE), []
        norm.weight.data, norm.bias.data = norm.weight.data.to(kind), norm.bias.data.to(kind)
        for _ in range(3):
            x = draw(70, 48, dtype=dtype).requires_grad_()
            y = norm(x)
            y.backward(draw(70, 48, dtype=dtype))
            seen += [y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone(), *norm.buffers()]
        assert (y.grad_fn.name() == NODE) == (dispatch.current_choice() == "triton")
        return seen

    equal_to_the_reference(run, 6e-3)


@pytest.mark.parametrize("spec", ["un(window=2, warmup=1)", "power(groups=0, warmup=1)", "batch"])
def test_what_a_checkpoint_recomputes(spec):
    def run():
        norm, seen = normkit.make(spec, 40).to(DEVICE), []
        for _ in range(3):
            x = draw(5, 40).requires_grad_()
            checkpoint(norm, x, use_reentrant=False).backward(draw(5, 40))
            seen += [x.grad, *norm.buffers()]
        assert int(norm.step) == 3
        return seen

    equal_to_the_reference(run)


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

    equal_to_the_reference(run)


def test_a_step_is_counted():
    norm, x = normkit.make("power(groups=0, warmup=1)", 40).to(DEVICE), draw(6, 40).requires_grad_()
    with normkit.kernels("triton") as ran:
        norm(x).backward(draw(6, 40))
    assert dict(ran) == {"triton train_step": 1}


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
