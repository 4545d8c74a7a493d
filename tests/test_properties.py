"""Random inputs and options: a norm works, or raises an error with what is allowed."""

import math
import traceback

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from norm_cases import reads_its_sample, short
from torch.testing import assert_close

from normkit.norms import NORMS, StatNorm, fix_embedding, make, option_defaults, parse

some = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
every = pytest.mark.parametrize("name", NORMS)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NOT_FLOATS = [torch.int64, torch.uint8, torch.bool, torch.complex64]
LAYOUTS = {  # how rows `[..., C]` with the same numbers lie in memory
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negative step": lambda x: x.flip(-1).contiguous().flip(-1),
    "offset": lambda x: torch.cat([torch.ones(3, dtype=x.dtype), x.flatten()])[3:].view(x.shape),
}

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)
dims = st.sampled_from([2, 4, 6])


def is_explained(error: Exception) -> bool:
    """Return True if normkit raised the error itself, with an explanation."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError | TypeError) and "normkit" in last.filename and len(str(error)) > 10


@every
@given(data=st.data())
@some
def test_every_shape_type_layout_and_mask(name, data):
    """Shape and type are kept; memory layout changes nothing; state stays finite."""
    dim, leading = data.draw(dims), data.draw(shapes)
    dtype, layout = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(list(LAYOUTS)))
    assume(leading or not reads_its_sample(short(name)))
    plain = torch.randn((*leading, dim), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = LAYOUTS[layout](plain.to(dtype)) if math.prod(leading) and leading else plain.to(dtype)
    mask = None
    if data.draw(st.booleans()):
        bits = data.draw(st.lists(st.booleans(), min_size=math.prod(leading), max_size=math.prod(leading)))
        mask = torch.tensor(bits, dtype=torch.bool).view(leading)
        if data.draw(st.booleans()) and mask.dim() > 1:
            mask = mask.transpose(0, -1).contiguous().transpose(0, -1)
    norm, twin = (make(short(name), dim) for _ in range(2))
    for step in range(4):
        leaf, other = x.detach().requires_grad_(), x.contiguous().clone().requires_grad_()
        y, z = norm(leaf, mask), twin(other, mask)
        assert y.shape == x.shape
        assert y.dtype is dtype
        assert y.isfinite().all()
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        y.backward(dy)
        z.backward(dy)
        assert leaf.grad.shape == x.shape
        assert leaf.grad.dtype is dtype
        assert leaf.grad.isfinite().all()
        assert_close(z, y, rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-2 if dtype.itemsize == 2 else 1e-5)
    for key, buffer in norm.named_buffers():
        assert buffer.isfinite().all(), key
    if isinstance(norm, StatNorm):
        real = math.prod(leading) if mask is None else int(mask.sum())
        assert int(norm.step) == (4 if real else 0)
        assert int(norm.skipped) == (0 if real else 4)
    assert norm.eval()(x, mask).shape == x.shape


@every
@given(data=st.data())
@some
def test_wrong_inputs_raise_an_explained_error(name, data):
    dim = data.draw(dims)
    norm = make(short(name), dim).train(data.draw(st.booleans()))
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    leading = data.draw(shapes)
    good, no = torch.ones((*leading, dim)), torch.bool
    wrong = data.draw(st.sampled_from([
        (torch.ones((*leading, dim + 1)), None), (torch.ones(()), None), ([[0.0] * dim], None), (None, None),
        *((torch.ones((*leading, dim), dtype=dtype), None) for dtype in NOT_FLOATS),
        (good, torch.ones(leading)), (good, torch.ones((*leading, 1), dtype=no)),
        (good, torch.ones((*leading, dim), dtype=no)), (good, torch.ones((7, *leading), dtype=no)),
        (good, [True]), (good, 1), (good, torch.ones(leading, dtype=no, device="meta")),
    ]))  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as caught:
        norm(*wrong)
    assert is_explained(caught.value), caught.value
    for key, value in norm.state_dict().items():
        assert_close(value, before[key], rtol=0, atol=0)


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.floats(), st.text(max_size=8), st.just((2, 3)), st.just([4]),
    st.sampled_from(["inside", "outside", "token", "sample", "paper", "released", "scalar", "channel"]),
    st.sampled_from([0.5, 1.0, 1e-5, 0.0, -1.0, math.inf, -math.inf, math.nan, 10**30, 1e300]),
)  # fmt: skip


@every
@given(data=st.data())
@settings(some, max_examples=30)
def test_options_work_or_raise_an_explained_error(name, data):
    """Six steps and an inference are finite, or building the norm raises."""
    known = option_defaults(NORMS[name])
    given_options = {key: data.draw(anything, label=key) for key in known if data.draw(st.booleans())}
    dim = data.draw(st.one_of(dims, anything))
    try:
        norm = NORMS[name](dim, **given_options)
    except (ValueError, TypeError) as error:
        assert is_explained(error), error  # noqa: PT017
        return
    x = torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(1))
    for _ in range(6):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert leaf.grad.isfinite().all()
    assert norm.eval()(x).isfinite().all()
    again = make(norm.spec, dim)
    assert again.spec == norm.spec
    assert type(again) is type(norm)


@given(
    text=st.one_of(
        st.text(max_size=30), st.from_regex(r"[a-z]{1,6}(\([a-z_]{1,9}=[-0-9a-z.'\"]{1,6}\))?", fullmatch=True)
    )
)
@settings(some, max_examples=100)
def test_specs_are_parsed_or_raise_an_explained_error(text):
    try:
        name, options = parse(text)
    except ValueError as error:
        assert is_explained(error), error  # noqa: PT017
        return
    assert name in NORMS
    assert options.keys() <= option_defaults(NORMS[name]).keys()


@given(thing=anything)
@some
def test_other_types_than_specs_raise_an_explained_error(thing):
    if not isinstance(thing, str):
        with pytest.raises(TypeError, match="string"):
            make(thing, 4)
    with pytest.raises((TypeError, ValueError)) as caught:
        fix_embedding(thing)
    assert is_explained(caught.value)
