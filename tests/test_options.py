"""Options of norms, norms that users change or write, and wrong arguments."""

import inspect
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from norm_cases import full_disk
from torch import nn
from torch.autograd import forward_ad

import normkit
import normkit as nk
from normkit import watch
from normkit.norms import NORMS, RowNorm
from normkit.norms._options import Count, option_defaults


class Mine(RowNorm):
    size: Count = 3
    kind: Literal["a", "b", "c"] = "a"
    limit: float | None = None
    constant = 7

    def normalize(self, x, mask):
        return x


@pytest.mark.parametrize("name", NORMS)
def test_signatures_show_every_option_with_its_default(name):
    parameters = inspect.signature(NORMS[name]).parameters
    assert next(iter(parameters)) == "dim"
    shown = {key: p.default for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert shown == nk.options(name)
    assert {"eps", "affine", "bias"} <= shown.keys()
    assert "Annotated" not in str(inspect.signature(NORMS[name]))


@pytest.mark.parametrize("name", NORMS)
def test_device_and_dtype_are_arguments_as_in_torch(name):
    norm = nk.make(name, 8, device="meta", dtype=torch.bfloat16)
    assert {p.dtype for p in norm.parameters()} <= {torch.bfloat16}
    assert all(t.is_meta for t in [*norm.parameters(), *norm.buffers()])
    assert torch.bfloat16 not in {b.dtype for b in norm.buffers()}
    assert {"device", "dtype"}.isdisjoint(nk.options(name))
    assert NORMS[name](8, device=None, dtype=None).spec == nk.make(name, 8).spec  # as timm builds its norms


def test_annotated_attributes_with_a_default_are_options():
    assert option_defaults(Mine) == {
        "eps": 1e-5, "affine": True, "bias": True, "size": 3, "kind": "a", "limit": None
    }  # fmt: skip
    norm = Mine(4, size=5, limit=0.5)
    assert (norm.size, norm.kind, norm.limit, norm.spec) == (5, "a", 0.5, "Mine(size=5, limit=0.5)")


def test_numbers_of_numpy_become_those_of_python():
    norm = nk.UN(np.int64(4), window=np.int64(2), alpha=np.float64(0.5), eps=np.float32(0.25))
    assert norm.spec == "un(eps=0.25, window=2, alpha=0.5)"
    assert repr(nk.make(norm.spec, 4)) == repr(norm) == "UN(4, un(eps=0.25, window=2, alpha=0.5))"


@pytest.mark.parametrize(
    ("argument", "value"),
    [("size", 0), ("size", True), ("kind", "d"), ("limit", "x"), ("bias", 1)],
)
def test_value_outside_the_annotation_raises(argument, value):
    with pytest.raises(ValueError, match=argument):
        Mine(4, **{argument: value})


@pytest.mark.parametrize(
    ("argument", "spec"),
    [("window", "un(window=999999999)"), ("window", "un(window=2, window=3)"), ("wind", "un(wind=2)")],
)
def test_a_spec_with_a_wrong_option_raises(argument, spec):
    with pytest.raises(ValueError, match=argument):
        nk.make(spec, 4)
    with pytest.raises(TypeError, match="window"):  # the nearest
        nk.UN(4, windw=2)


def test_class_variable_is_no_option():
    class Fixed(Mine):
        kind: ClassVar[str] = "b"

    assert "kind" not in option_defaults(Fixed)
    assert Fixed(4).kind == "b"


@pytest.mark.parametrize(("name", "hint"), [("bias", "alias"), ("split", "method")])
def test_names_that_are_taken_raise_with_what_to_do(name, hint):
    with pytest.raises(TypeError, match=hint):
        type("Taken", (RowNorm,), {"__annotations__": {name: bool}, name: False})


def test_torch_jit_script_raises_with_what_to_use():
    with pytest.raises(TypeError, match="UN"):
        torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), nk.UN(4)))


# -- norms that users change or write, and transforms of torch.func ----------------------------------------------------


def test_a_rule_may_return_a_buffer():
    class Before(normkit.norms.StatNorm):
        exact_grad = False

        def train_stat(self, batch, step, count, state):
            return normkit.norms.Stat(state.running.to(batch.dtype), {"running": self.average(batch, state)})

    norm = Before(2, eps=0.0)
    torch.testing.assert_close(norm(torch.full((4, 2), 10.0)), torch.full((4, 2), 10.0))
    assert norm.running[0, 0] == pytest.approx(0.9 + 0.1 * 100)


@pytest.mark.parametrize(
    ("value", "state", "grads", "named"),
    [
        (lambda b: b[0], "running", lambda b: b, "Stat.value"), (lambda b: b, "runing", lambda b: b, "runing"),
        (lambda b: b, "running", lambda b: b[0], "gradient"),
    ],
)  # fmt: skip
def test_rules_of_another_shape_or_buffer_are_named(value, state, grads, named):
    """They would be broadcast over the channels."""

    class Wrong(normkit.norms.StatNorm):
        def train_stat(self, batch, step, count, buffers):
            return normkit.norms.Stat(value(batch), {state: self.average(batch, buffers)})

        def grad_stat(self, batch, step, saved, state):
            return grads(batch), {}

    with pytest.raises(ValueError, match=named):
        Wrong(2)(torch.randn(4, 2, requires_grad=True)).sum().backward()


def test_training_in_transforms_of_torch_func_and_in_forward_mode_raises():
    norm, x = normkit.make("un", 4), torch.randn(6, 4)
    state = {name: t.clone() for name, t in norm.named_buffers()}

    def loss(parameters):
        return torch.func.functional_call(norm, (parameters, state), (x,)).sum()

    with pytest.raises(RuntimeError, match="eval"):
        torch.func.grad(loss)(dict(norm.named_parameters()))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="eval"):
        norm(forward_ad.make_dual(x, x))
    assert norm.step == 0
    norm.eval()
    torch.func.grad(loss)(dict(norm.named_parameters()))


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_batched_gradients_of_a_norm_that_keeps_their_statistics_raise(choice):
    norm, x = normkit.make("un", 4), torch.randn(6, 4, requires_grad=True)
    with normkit.kernels(choice):
        y = norm(x)
        with pytest.raises(RuntimeError, match="vmap"):
            torch.autograd.grad(y, x, torch.randn(3, 6, 4), is_grads_batched=True)
        exact = normkit.make("pnv", 4)
        with normkit.kernels("reference"):
            torch.autograd.grad(exact(x), x, torch.randn(3, 6, 4), is_grads_batched=True)
    assert norm.skipped_grad == norm.window_g.abs().sum() == 0


def test_a_derived_norm_with_a_constructor_of_its_own_folds():
    class Clipped(normkit.norms.LayerNorm):
        def __init__(self, dim):
            super().__init__(dim, eps=0.5)
            self.most = 1.0

        def normalize(self, x, mask):
            return super().normalize(x.clamp(-self.most, self.most), mask)

    norm = Clipped(4).eval()
    nn.init.uniform_(norm.weight)
    model = nn.Sequential(norm, nn.Linear(4, 2)).eval()
    folded, report = normkit.fold(model, x := torch.randn(3, 4))
    assert report.count("gain folded") == 1
    assert folded[0].weight is None
    torch.testing.assert_close(folded(x), model(x))


# -- wrong arguments: errors name them; models and files stay as they were ---------------------------------------------


X = torch.randn(4, 5, 8)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).eval()


def un() -> nn.Sequential:
    return nk.convert(layers(), "un")


CASES = [  # name of the argument in the error, call
    ("forward", lambda: nk.calibrate(un(), [X], forward=3)),
    ("UN", lambda: nk.calibrate(un(), [3])),
    ("outputs", lambda: nk.fold(un(), X, outputs="y")),
    ("example", lambda: nk.fold(un(), X.to("meta"))),
    ("inplace", lambda: nk.convert(layers(), "un", inplace="x")),
    ("untie", lambda: nk.fold(un(), X, untie="no")),
    ("folder", lambda: watch.read_run("nowhere")),
    ("scale_loss", lambda: nk.scale_loss(None).__enter__()),
    ("init", lambda: nk.fix_embedding(nn.Embedding(3, 4), init=-1)),
    ("eps", lambda: nk.norms.FixNorm("x")),
    ("to", lambda: watch.Recorder(layers(), to=4)),
    ("alpha", lambda: watch.Recorder(layers(), alpha="x")),
    ("quantities", lambda: watch.Recorder(layers(), quantities=[])),
    ("rows", lambda: watch.Recording(None)),
    ("rows", lambda: nk.diagnose(3)),
]


@pytest.mark.parametrize(("argument", "call"), CASES, ids=[argument for argument, _ in CASES])
def test_the_error_names_the_argument(argument, call):
    with pytest.raises((TypeError, ValueError), match=argument):
        call()


def test_rows_are_checked_before_a_file_changes(tmp_path):
    watch.write(path := tmp_path / "rows.csv", [row := watch.Row(1, "norm", "un", "rms", 1.0)])
    for wrong in ([(1, "norm", "un", "rms", 1.0)], "ab", None, [row, 3]):
        with pytest.raises(TypeError, match="rows"):
            watch.write(path, wrong)
    assert watch.read(path) == [row]


def test_a_full_disk_ends_an_export_with_an_error(tmp_path):
    with pytest.raises(OSError, match="large"), full_disk():
        nk.export(layers(), tmp_path / "m.pt2", X)
    assert not list(tmp_path.iterdir())
