"""Options of norms: annotated class attributes, seen in signatures, checked when built."""

import inspect
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

import normkit as nk
from normkit.norms import NORMS, RowNorm, StatNorm
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


def test_a_constructor_of_ones_own_may_pass_options_on():
    class Own(StatNorm):
        def __init__(self, dim, *, strength=2.0, eps=1e-3):
            super().__init__(dim, eps=eps, scalar=True)
            self.strength = strength

    assert Own(4, strength=3.0).spec == "Own(scalar=True, strength=3.0)"


def test_torch_jit_script_raises_with_what_to_use():
    with pytest.raises(TypeError, match="UN"):
        torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), nk.UN(4)))
