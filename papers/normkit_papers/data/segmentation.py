"""Outlines of objects in COCO's formats, polygons and run lengths, as masks."""

import sys
from typing import Any

import torch
from torch import Tensor

from normkit._util import is_number


def filled(outline: Any, height: int, width: int) -> Tensor:
    """Return polygons or run lengths as a mask `[height, width]` of 0 and 1.

    >>> filled([[0.0, 0, 2, 0, 2, 2, 0, 2]], 3, 4).sum()
    tensor(4)
    """
    from pycocotools import mask

    lengths: Any = run_lengths(outline, height, width)
    return torch.from_numpy(mask.decode(lengths))


def run_lengths(outline: Any, height: int, width: int) -> dict[str, Any]:
    """Return polygons or run lengths as compressed run lengths."""
    from pycocotools import mask

    tools: Any = mask
    if isinstance(outline, list):
        return tools.merge(tools.frPyObjects(outline, height, width))
    return tools.frPyObjects(outline, height, width) if isinstance(outline["counts"], list) else outline


def drawable(outline: Any, height: int, width: int) -> bool:
    """Return True for valid polygons or run lengths, or no outline.

    Polygons have at least three points near the image; run lengths have its size.

    pycocotools does not check its input: another outline can crash the process.
    """
    if not outline:
        return True
    if isinstance(outline, list):
        far = 2 * max(height, width)
        return all(
            isinstance(ring, list)
            and len(ring) >= 6
            and len(ring) % 2 == 0
            and all(finite(at) and abs(at) <= far for at in ring)
            for ring in outline
        )
    return isinstance(outline, dict) and outline.get("size") == [height, width] and _runs(outline)


def _runs(outline: dict[str, Any]) -> bool:
    """Return True if run lengths, as numbers or text, add up to their size."""
    height, width = outline["size"]
    counts = outline.get("counts")
    counts = decode_counts(counts) if isinstance(counts, str) else counts
    return (
        isinstance(counts, list)
        and all(isinstance(n, int) and n >= 0 for n in counts)
        and sum(counts) == height * width
    )


def decode_counts(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; None for other text.

    A character has five bits; from the fourth number on, a number is the difference to the last but one.

    >>> decode_counts("3260")
    [3, 2, 6, 2]
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << (shift - 4)  # the sign
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    return counts if not shift else None


def finite(value: Any) -> bool:
    """Return True for a finite number."""
    return is_number(value) and abs(value) <= sys.float_info.max  # also for integers beyond floats
