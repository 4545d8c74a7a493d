"""Dataclass fields with limits, and a base class of settings that checks them."""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from normkit._util import is_int, is_number, plain, require
from normkit.norms._options import PLAIN, Allowed

LARGEST = 2**62
SINGLE = PLAIN | {
    int: Allowed("a whole number", lambda v: is_int(v) and abs(v) < LARGEST),
    float: Allowed("a finite number", lambda v: is_number(v) and abs(v) <= sys.float_info.max),
    str: Allowed("text", PLAIN[str].test),
}
SEVERAL = {int: "whole numbers", float: "finite numbers", str: "texts"}
BOUNDS = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "below": ("below", lambda value, bound: value < bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
}


def limited(default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """Return a dataclass field with bounds: `at_least`, `above`, `below`, `at_most`."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Base class of settings: each field is checked against its annotation and its bounds.

    Annotations are int, float, str, bool, Literal, tuples, dictionaries and optional ones of these. Lists, as JSON has
    them, become tuples, NumPy's numbers Python's. Numbers must be finite.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Example(Checked):
    ...     rate: float = limited(0.1, above=0)
    >>> Example(rate=float("inf"))
    Traceback (most recent call last):
    ...
    ValueError: rate must be a finite number; got inf
    """

    prefix: ClassVar[str] = ""
    """What error messages put before the name of a field."""

    def __post_init__(self):
        for name, is_tuple, allowed, bounds in _checks(type(self)):
            value = getattr(self, name)
            value = tuple(map(plain, value)) if is_tuple and isinstance(value, list | tuple) else plain(value)
            object.__setattr__(self, name, value)
            is_large = is_int(value) and allowed.text.startswith(SINGLE[int].text)  # else it would be allowed
            text = f"{SINGLE[int].text} between -2**62 and 2**62" if is_large else allowed.text
            require(allowed.test(value), self.prefix + name, value, text)
            if value is not None and not all(BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
                allowed_bounds = " and ".join(f"{BOUNDS[kind][0]} {bound}" for kind, bound in bounds.items())
                require(False, self.prefix + name, value, allowed_bounds)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Make an instance from a dictionary as in JSON, also for nested settings.

        Raises:
            ValueError: If a value is missing, unknown or not allowed.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"settings must be a JSON object; got {values!r:.80}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - fields.keys()):
            raise ValueError(f"unknown settings: {', '.join(map(repr, unknown))}")
        missing = [
            name
            for name, field in fields.items()
            if name not in values and field.default is field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"missing settings: {', '.join(missing)}")
        hints = _hints(cls)
        nested = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Checked)}
        return cls(**{k: nested[k].from_dict(value) if k in nested else value for k, value in values.items()})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _checks(cls: Any) -> list[tuple[str, bool, Allowed, Mapping[str, float]]]:
    """Return name, whether it is a tuple, allowed values and bounds of each field."""
    hints = _hints(cls)
    return [
        (each.name, typing.get_origin(hints[each.name]) is tuple, _allowed(hints[each.name]),
         each.metadata.get("bounds", {}))
        for each in dataclasses.fields(cls)
    ]  # fmt: skip


def _allowed(hint: Any) -> Allowed:
    """Return what an annotation allows, read once for thousands of values.

    >>> _allowed(tuple[int, ...]).text, _allowed(int | None).text
    ('whole numbers', 'a whole number, or None')
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return Allowed(f"one of {', '.join(arguments)}", lambda v: isinstance(v, str) and v in arguments)
    parts = [_allowed(argument) for argument in arguments if argument is not Ellipsis]
    tests = [part.test for part in parts]

    def fit(values: Iterable[Any]) -> bool:
        return all(test(value) for test, value in zip(tests, values, strict=True))

    if origin is types.UnionType:
        return Allowed(", or ".join(part.text for part in parts), lambda v: any(test(v) for test in tests))
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return Allowed(SEVERAL[arguments[0]], lambda v: isinstance(v, tuple) and all(map(tests[0], v)))
    if origin is tuple:
        text = f"{len(tests)} {SEVERAL[arguments[0]]}"
        return Allowed(text, lambda v: isinstance(v, tuple) and len(v) == len(tests) and fit(v))
    if origin is dict:
        return Allowed("a mapping of texts to texts", lambda v: isinstance(v, dict) and all(map(fit, v.items())))
    return SINGLE.get(hint) or Allowed(f"settings of class {hint.__name__}", lambda v: isinstance(v, hint))
