"""Options of norms: annotated class attributes, checked and stored when a norm is made."""

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, dataclass_transform, get_args, get_origin

from torch import nn

from normkit._util import is_int, is_number, plain, require, unknown
from normkit.kernels.sync import is_group


class Allowed(NamedTuple):
    """Values that an option takes: in words for the error message, and as a test."""

    text: str
    test: Callable[[Any], bool]


# Types of options. Whole numbers must fit a counter on the device, windows its
# memory; factors must be far from the limit of float32.
Count = Annotated[int, Allowed("a whole number >= 1", lambda v: is_int(v) and 1 <= v < 2**62)]
Window = Annotated[int, Allowed("a whole number from 1 to 65536", lambda v: is_int(v) and 1 <= v <= 65536)]
Steps = Annotated[int, Allowed("a whole number >= 0", lambda v: is_int(v) and 0 <= v < 2**62)]
Warmup = Steps | Literal["auto"]
Epsilon = Annotated[float, Allowed("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1)]
OldShare = Annotated[float, Allowed("a number >= 0 and < 1", lambda v: is_number(v) and 0 <= v < 1)]
Positive = Annotated[float, Allowed("a number above 0, at most 1e9", lambda v: is_number(v) and 0 < v <= 1e9)]
Processes = Annotated[Any, Allowed("a process group of torch.distributed that has this process", is_group)]
Bound = Annotated[float, Allowed("a number >= 1, at most 1e9", lambda v: is_number(v) and 1 <= v <= 1e9)]

PLAIN = {
    bool: Allowed("True or False", lambda v: isinstance(v, bool)),
    int: Allowed("a whole number", is_int),
    float: Allowed("a number", is_number),
    str: Allowed("a string", lambda v: isinstance(v, str)),
    types.NoneType: Allowed("None", lambda v: v is None),
}


class Option(NamedTuple):
    """One option: default, argument of the constructor, attribute of the norm, annotation."""

    default: Any
    argument: str = ""
    attribute: str = ""
    kind: Any = None

    def check(self, value: object) -> None:
        """Raise a ValueError unless `value` fits the annotation."""
        rules = [_rule(kind) for kind in _members(self.kind)]
        require(any(r.test(value) for r in rules), self.argument, value, " or ".join(r.text for r in rules))


def option(*, default: Any = inspect.Parameter.empty, alias: str = "", kw_only: bool = True) -> Any:
    """Declare an option with an `alias` as argument, or a positional one for type checkers."""
    return Option(default, alias)


@dataclass_transform(kw_only_default=True, field_specifiers=(option,))
class HasOptions(nn.Module):
    """Module with options declared as a dataclass declares fields.

    `window: Count = 4` in the body of a subclass is an option: a keyword argument of the constructor with this default,
    checked by its annotation (a type above, bool, int, float, str, `Literal`, or `... | None`), stored as `self.window`
    before `build()` runs. An attribute without annotation, or annotated as `ClassVar`, is none. Type checkers and
    editors show the constructor by `dataclass_transform`; `inspect.signature` has it, too.
    """

    declared: ClassVar[dict[str, Option]] = {}
    __signature__: ClassVar[inspect.Signature | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = dict(cls.declared)
        for attribute, kind in inspect.get_annotations(cls, eval_str=True).items():
            if kind is ClassVar or get_origin(kind) is ClassVar:  # takes an inherited option away, as in dataclasses
                declared = {key: each for key, each in declared.items() if each.attribute != attribute}
            elif attribute in vars(cls):
                if callable(getattr(cls.__base__, attribute, None)):
                    raise TypeError(f"{cls.__name__}.{attribute}: options cannot have the name of a method; rename it")
                if attribute in declared and declared[attribute].attribute != attribute:
                    use = f'{declared[attribute].attribute}: ... = option(default=..., alias="{attribute}")'
                    raise TypeError(f"{cls.__name__}.{attribute} names a parameter; declare the option as {use}")
                value = vars(cls)[attribute]
                default, argument = value[:2] if isinstance(value, Option) else (value, "")
                declared[argument or attribute] = Option(default, argument or attribute, attribute, kind)
        cls.declared = {key: each for key, each in declared.items() if each.default is not inspect.Parameter.empty}
        cls.__signature__ = None if "__init__" in vars(cls) else _signature(cls.declared)

    def __init__(self, dim: int, *, device: Any = None, dtype: Any = None, **options: Any):
        nn.Module.__init__(self)  # a class of PyTorch among the bases has a constructor of its own
        require(is_int(dim) and 0 < dim < 2**31, "dim", dim, "a whole number above 0")
        self.dim = plain(dim)
        for name in options.keys() - self.declared.keys():
            raise TypeError(str(unknown(self.declared, name, f"option of {type(self).__name__}")))
        for name, each in self.declared.items():
            value = options.get(name, each.default)
            each.check(value)
            setattr(self, each.attribute, plain(value))
        self.build()
        if device is not None or dtype is not None:
            self.to(device, dtype)

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""


def option_defaults(kind: type[HasOptions]) -> dict[str, Any]:
    """Return the options of a norm class and their defaults."""
    return {name: each.default for name, each in kind.declared.items()}


def _signature(declared: dict[str, Option]) -> inspect.Signature:
    """Return the signature of a constructor: `dim`, then the options by name."""
    place, named = inspect.Parameter, []
    for name, each in declared.items():
        plain = (kind.__origin__ if get_origin(kind) is Annotated else kind for kind in _members(each.kind))
        kind = functools.reduce(operator.or_, plain)
        named.append(place(name, place.KEYWORD_ONLY, default=each.default, annotation=kind))
    return inspect.Signature([place("dim", place.POSITIONAL_OR_KEYWORD, annotation=int), *named])


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _rule(kind: Any) -> Allowed:
    if get_origin(kind) is Annotated:
        return next((each for each in kind.__metadata__ if isinstance(each, Allowed)), _rule(kind.__origin__))
    if get_origin(kind) is Literal:
        *others, last = (f'"{each}"' for each in get_args(kind))
        return Allowed(" or ".join([*filter(None, [", ".join(others)]), last]), lambda v: v in get_args(kind))
    return PLAIN.get(kind, Allowed("anything", lambda _: True))
