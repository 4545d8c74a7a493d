"""Types of settings, which pydantic checks, and its errors in one sentence."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

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


CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How pydantic checks the values of settings."""


def explain(error: ValidationError) -> str:
    """Return all problems of an error of pydantic in a line."""
    return "; ".join(map(_problem, error.errors(include_url=False)))


def _problem(found: Any) -> str:
    if found["type"] == "value_error":  # one of our own
        return str(found["ctx"]["error"])
    place, message = ".".join(map(str, found["loc"])), found["msg"]
    return f"{place or 'settings'}: {message[:1].lower()}{message[1:]}; got {found['input']!r:.80}"
