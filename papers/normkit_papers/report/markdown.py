"""Markdown: tables, and the places of a page that are filled from results."""

import re
from collections.abc import Callable, Iterable, Sequence

PLACE = re.compile(r"<!-- measured: (\S+) -->\n.*?<!-- /measured -->", re.DOTALL)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], numbers: int = 0) -> str:
    """Format a table; after the first column, `numbers` columns are aligned to the right.

    >>> print(table(["norm", "PER"], [["un", 10.2]]))
    | norm | PER |
    |---|---|
    | un | 10.2 |
    """
    rule = "---|" + "---:|" * numbers + "---|" * (len(head) - 1 - numbers)
    first, *others = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([first, f"|{rule}", *others])


def fill(page: str, made: Callable[[str], str | None]) -> str:
    """Fill the places `<!-- measured: NAME -->` ... `<!-- /measured -->` of a page.

    Args:
        page: Text of the page.
        made: Returns the content of a place by its name; None to leave it as it is.
    """

    def replaced(found: re.Match[str]) -> str:
        text = made(found[1])
        return found[0] if text is None else f"<!-- measured: {found[1]} -->\n{text}\n<!-- /measured -->"

    return PLACE.sub(replaced, page)
