"""Dataclass fields with limits, and a base class of settings that checks them."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Self

from normkit.norms._options import is_int, is_number, require

LARGEST = 2**62
NAMES = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False"}
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
    them, become tuples. Numbers must be finite.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Example(Checked):
    ...     rate: float = limited(0.1, above=0)
    >>> Example(rate=float("inf"))
    Traceback (most recent call last):
    ...
    ValueError: rate must be a finite number; got inf
    """

    def __post_init__(self):
        prefix = self._prefix()
        for name, hint, is_tuple, fits, bounds in _checks(type(self)):
            value = getattr(self, name)
            if is_tuple and isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if not fits(value):
                require(False, prefix + name, value, _describe(hint))
            if value is not None and not all(BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
                require(False, prefix + name, value, _bounds(bounds))

    @classmethod
    def _prefix(cls) -> str:
        """Return what error messages put before the name of a field."""
        return ""

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
def _checks(cls: Any) -> list[tuple[str, Any, bool, Callable[[Any], bool], Mapping[str, float]]]:
    """Return name, annotation, whether it is a tuple, test and bounds of each field."""
    hints = _hints(cls)
    return [
        (field.name, hints[field.name], typing.get_origin(hints[field.name]) is tuple, _test(hints[field.name]),
         field.metadata.get("bounds", {}))
        for field in dataclasses.fields(cls)
    ]  # fmt: skip


def _test(hint: Any) -> Callable[[Any], bool]:
    """Return the test of a value for an annotation, read once for thousands of values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin is types.UnionType:
        tests = [_test(argument) for argument in arguments]
        return lambda value: any(test(value) for test in tests)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        every = _test(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(every, value))
    if origin is tuple:
        tests = [_test(argument) for argument in arguments]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(each) for test, each in zip(tests, value, strict=True))
        )
    if origin is dict:
        key, item = map(_test, arguments)
        return lambda value: isinstance(value, dict) and all(key(k) and item(v) for k, v in value.items())
    if hint is float:
        return lambda value: is_number(value) and math.isfinite(value)
    if hint is int:
        return lambda value: is_int(value) and abs(value) < LARGEST
    return lambda value: isinstance(value, hint)


def _describe(hint: Any) -> str:
    """Describe an annotation in words.

    >>> _describe(tuple[int, ...]), _describe(int | None)
    ('whole numbers', 'a whole number, or None')
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(arguments)}"
    if origin is types.UnionType:
        return ", or ".join("None" if argument is type(None) else _describe(argument) for argument in arguments)
    if origin is tuple:
        what = {int: "whole numbers", float: "finite numbers", str: "texts"}[arguments[0]]
        return what if arguments[1:] == (Ellipsis,) else f"{len(arguments)} {what}"
    if origin is dict:
        return "a mapping of texts to texts"
    return NAMES.get(hint, f"settings of class {hint.__name__}")


def _bounds(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{BOUNDS[kind][0]} {bound}" for kind, bound in bounds.items())
