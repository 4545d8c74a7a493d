"""Text output: aligned tables, norm specs, short lists, escaped control characters."""

from collections.abc import Collection, Iterable, Mapping, Sequence

JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # several scripts cannot be written without them


def escape(text: str, keep: str = "") -> str:
    r"""Escape characters that are not printable, such as those that control a terminal.

    Names, symbols and messages that come from a file pass through here before they are printed.

    Args:
        text: Any text.
        keep: Further characters to leave as they are, such as a line end.

    >>> print(escape("un\x1b[31m"))
    un\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c in JOINERS or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def align(lines: Sequence[Sequence[str]], right: Collection[int] = (), heads: int = 0) -> str:
    """Align the cells of lines in columns, two spaces apart.

    Args:
        lines: The cells of each line; all lines have the same number of cells.
        right: Numbers of the columns that are aligned to the right, as numbers are.
        heads: Number of lines at the top that a rule separates from the others; 0 draws no rule.

    >>> print(align([["norm", "PER"], ["un", "10.2"]], right=[1], heads=1))
    norm   PER
    ----------
    un    10.2
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if heads:
        aligned.insert(heads, "-" * max(map(len, aligned)))
    return "\n".join(aligned)


def truncate(names: Sequence[str], most: int = 6) -> list[str]:
    """The first names of a list and the number of the others.

    A single name that would be left out is listed instead.

    >>> truncate(["a"] * 9)[-2:]
    ['a', '3 more']
    """
    return list(names) if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} more"]


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(dict.fromkeys(names))


def listed(names: Iterable[str], most: int = 3) -> str:
    """List the first few names in a model, each once, and the number of the others.

    >>> listed(["a", "b", "a", "c"], most=2)
    'a, b and 1 more'
    """
    names = unique(name or "(the model itself)" for name in names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_spec(name: str, options: Mapping[str, object]) -> str:
    """The spec of a norm, from its name and options.

    >>> format_spec("un", {"window": 2}), format_spec("layer", {})
    ('un(window=2)', 'layer')
    """
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else "")
