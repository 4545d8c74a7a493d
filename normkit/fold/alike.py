"""One line in place of many, for modules that are alike in several blocks of a model."""

import re
from collections.abc import Sequence

NAME = re.compile(r"(?=[\w.-]*[A-Za-z])[\w-]+(?:\.[\w-]+)+")  # of a module inside others
MARK = "#"  # in place of the number of a block


def marked(text: str) -> tuple[str, list[int], list[int]]:
    """Mark the numbers in the names of modules; return the text, the numbers, and the place of each in its name.

    >>> marked("h.3.mlp.1 and h.4.attn")
    ('h.#.mlp.# and h.#.attn', [3, 1, 4], [0, 1, 0])
    """
    numbers, places = list[int](), list[int]()

    def mark(name: re.Match[str]) -> str:
        parts, place = name[0].split("."), 0
        for at, part in enumerate(parts):
            if part.isdigit():
                numbers.append(int(part))
                places.append(place)
                parts[at], place = MARK, place + 1
        return ".".join(parts)

    return NAME.sub(mark, text), numbers, places


def together(rows: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return one name and text for modules whose names and texts are equal once `marked`; None if numbers do not fit.

    A star is the number of the module's own block.

    >>> together([(f"h.{n}.norm", f"h.{n}.up, h.{n + 1}.gate, h.0.down") for n in (0, 1, 2, 5)])
    ('h.{0-2,5}.norm', 'h.*.up, h.*+1.gate, h.0.down')
    >>> together([("h.1.norm", "h.3.up"), ("h.2.norm", "h.0.up")])
    """
    pattern, _, places = marked(rows[0][1])
    own = [marked(name)[1] for name, _ in rows]
    for place, column in zip(places, zip(*(marked(text)[1] for _, text in rows), strict=True), strict=True):
        shown = str(column[0])
        if len({*column}) > 1:
            steps = {number - mine[place] for number, mine in zip(column, own, strict=True) if place < len(mine)}
            if len(steps) != 1:
                return None
            shown = f"*{step:+d}" if (step := steps.pop()) else "*"
        pattern = pattern.replace(MARK, shown, 1)
    name, columns = marked(rows[0][0])[0], [sorted({*column}) for column in zip(*own, strict=True)]
    several = sum(len(numbers) > 1 for numbers in columns) > 1
    for numbers in columns:
        name = name.replace(MARK, "*" if several and len(numbers) > 1 else _ranges(numbers), 1)
    return name + f" ({len(rows)})" * several, pattern


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers as ranges.

    >>> _ranges([0, 1, 2, 5]), _ranges([3, 4]), _ranges([7])
    ('{0-2,5}', '{3,4}', '7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    found = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return str(numbers[0]) if len(numbers) == 1 else f"{{{','.join(found)}}}"
