"""One line in place of many, for modules that are alike in several blocks of a model."""

import re
from collections import defaultdict
from collections.abc import Sequence

NAME = re.compile(r"(?<![\w.])(?=(?:\d+\.)*[^\W\d])[\w-]+(?:\.[\w-]+)+")  # of a module inside others
NUMBER = re.compile(r"0|[1-9][0-9]*")  # of a block
MARK = "\0"  # in place of a number
LEAST = 3  # blocks
RUNS = 4  # of numbers that are written

Line = tuple[str, ...]


def join(lines: Sequence[Line]) -> list[Line]:
    """Join lines that are equal but for the number of a block, from three blocks on.

    Args:
        lines: The name of a module, cells, and a text with names of modules.

    Returns:
        The lines in their order, with `{0-5}` for the numbers of blocks in a name. In a text `*` is the number of the
        module's own block, `*+1` the next one.

    >>> join([("in", "un", "h.0.up"), *((f"h.{n}.norm", "un", f"h.{n}.up, h.{n + 1}.gate, in") for n in range(6))])
    [('in', 'un', 'h.0.up'), ('h.{0-5}.norm', 'un', 'h.*.up, h.*+1.gate, in')]
    """
    groups: dict[Line, list[int]] = defaultdict(list)
    for at, (name, *cells, text) in enumerate(lines):
        groups[_marked(name)[0], *cells, _marked(text)[0]].append(at)
    found: dict[int, Line] = {}
    for group in groups.values():
        blocks = {at: _marked(lines[at][0])[1] for at in group}
        counts = [len({*column}) for column in zip(*blocks.values(), strict=True)]
        place = max(range(len(counts)), key=counts.__getitem__, default=0)  # the only number that varies in a line
        parts: dict[Line, list[int]] = defaultdict(list)
        for at, block in blocks.items():
            parts[tuple(str(number) for k, number in enumerate(block) if k != place)].append(at)
        for part in parts.values():
            one = _joined([lines[at] for at in part], place) if counts and len(part) >= LEAST else None
            found |= {at: lines[at] for at in part} if one is None else {part[0]: one}
    return [found[at] for at in sorted(found)]


def _joined(lines: Sequence[Line], place: int) -> Line | None:
    """Return one line for lines whose names differ in one number; None if their texts do not fit."""
    pattern, _, places = _marked(lines[0][-1])
    own = [_marked(line[0])[1][place] for line in lines]
    texts = [_marked(line[-1])[1] for line in lines]
    for at, column in zip(places, zip(*texts, strict=True), strict=True):
        steps = {number - mine for number, mine in zip(column, own, strict=True)}
        if len({*column}) == 1:
            shown = str(column[0])
        elif at == place and len(steps) == 1:
            shown = f"*{step:+d}" if (step := steps.pop()) else "*"
        else:
            return None
        pattern = pattern.replace(MARK, shown, 1)
    name, numbers, _ = _marked(lines[0][0])
    for at, number in enumerate(numbers):
        name = name.replace(MARK, _ranges(sorted(own)) if at == place else str(number), 1)
    return name, *lines[0][1:-1], pattern


def _marked(text: str) -> tuple[str, list[int], list[int]]:
    """Replace the numbers of blocks in a text by marks.

    Returns:
        The text, the numbers, and the place of each among the numbers of its name.

    >>> text, numbers, places = _marked("h.3.mlp.1 and h.4.attn, 2 more")
    >>> text.replace(MARK, "#"), numbers, places
    ('h.#.mlp.# and h.#.attn, 2 more', [3, 1, 4], [0, 1, 0])
    """
    numbers, places = list[int](), list[int]()

    def mark(name: re.Match[str]) -> str:
        parts, place = name[0].split("."), 0
        for at, part in enumerate(parts):
            if NUMBER.fullmatch(part):
                numbers.append(int(part))
                places.append(place)
                parts[at], place = MARK, place + 1
        return ".".join(parts)

    return NAME.sub(mark, text), numbers, places


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers as ranges; of many the first ones and the last.

    >>> _ranges([0, 1, 2, 5]), _ranges([3, 4, 8]), _ranges(range(0, 20, 2))
    ('{0-2,5}', '{3,4,8}', '{0,2,4,...,18}')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    found = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    if len(found) > RUNS:
        found[RUNS - 1 : -1] = ["..."]
    return f"{{{','.join(found)}}}"
