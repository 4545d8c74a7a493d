"""Settings: frozen pydantic dataclasses whose errors are one sentence."""

import functools
from typing import Annotated, Any, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

LARGEST = 2**62

Count = Annotated[int, Field(ge=1, le=LARGEST)]
"""A whole number above 0."""
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
"""A whole number, or 0."""
Size = Annotated[int, Field(ge=1, le=2**20)]
"""A dimension; a larger one exceeds any memory."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def settings(cls: type) -> Any:
    """Make a class a frozen dataclass whose values pydantic checks.

    Raises:
        ValueError: If a value is unknown, missing, or not of its type or range.

    >>> @settings
    ... class Example:
    ...     rate: Positive = 0.1
    >>> Example(rate=-1)
    Traceback (most recent call last):
    ...
    ValueError: rate: input should be greater than 0; got -1
    """
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def __init__(self: Any, **given: Any) -> None:
        try:
            checked(self, **given)
        except ValidationError as error:
            raise ValueError(explain(error)) from None

    made.__init__ = __init__
    return made


def explain(error: ValidationError) -> str:
    """Return all problems of an error of pydantic in a line."""
    return "; ".join(map(_problem, error.errors(include_url=False)))


def _problem(found: Any) -> str:
    if found["type"] == "value_error":  # one of our own
        return str(found["ctx"]["error"])
    place, message = ".".join(map(str, found["loc"])), found["msg"]
    return f"{place or 'settings'}: {message[:1].lower()}{message[1:]}; got {found['input']!r:.80}"
