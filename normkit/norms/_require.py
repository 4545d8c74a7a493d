"""Options are checked when a norm is made: errors say what was given and what is allowed."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError that says what was given and what is allowed, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


def require_count(name: str, value: object, least: int = 1) -> None:
    """`value` is a whole number, at least `least`, that fits a counter on the device."""
    require(is_int(value) and least <= value < 2**62, name, value, f"a whole number >= {least}")  # type: ignore[operator]


def require_fraction(name: str, value: object) -> None:
    """`value` is a weight of the old value: at least 0, below 1."""
    require(is_number(value) and 0 <= value < 1, name, value, "a number >= 0 and < 1")  # type: ignore[operator]


def require_positive(name: str, value: object) -> None:
    """`value` is a number above 0 that float32 holds with room to spare."""
    require(is_number(value) and 0 < value <= 1e9, name, value, "a number above 0, at most 1e9")  # type: ignore[operator]


def is_int(value: object) -> bool:
    """Whether it is a whole number, True and False not among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number, True and False not among them."""
    return isinstance(value, int | float) and not isinstance(value, bool)
