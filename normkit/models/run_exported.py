"""Run a written file, and compare it with its model at other sizes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from normkit.models.difference import error
from normkit.models.tensor_model import TensorModel, resized

LONG = 4096  # tokens with which a model is tried once more, at most
TRIED = 2  # sizes below a limit that are compared
Axes = Mapping[str, tuple[int, ...]]
Limits = Mapping[str, tuple[int, int | None]]


def takes_other_sizes(model: TensorModel, path: Path, axes: Axes, tolerance: float) -> bool:
    """Return True if a file agrees with its model where each open axis is longer or shorter by one."""
    for more in (1, -1):
        given = list(model.given)
        for i, name in enumerate(model.names):
            for axis in axes.get(name, ()):
                given[i] = resized(given[i], axis, given[i].shape[axis] + more)
        try:
            with torch.no_grad():
                expected = model.all_outputs(*(t.clone() for t in given))
        except Exception:  # such as beyond its positions
            continue
        try:
            got = run(model, path, given)
        except Exception:
            return False
        return error(tuple(got), expected) <= tolerance
    return False


def true_limits(
    model: TensorModel, path: Path, axes: Axes, limits: Limits, tolerance: float
) -> tuple[Limits, bool]:  # fmt: skip
    """Return the limits of a file in float that hold, and whether the model itself goes on beyond one.

    Exporters also report sizes that only choose between equal ways to compute. So sizes beyond a limit are tried; one
    that is very large is not, and counts.
    """
    held, differs = dict[str, tuple[int, int | None]](), False
    for limited, (low, high) in limits.items():
        axis = int(limited.rsplit(" ", 1)[1])
        compare = partial(_beyond, model, path, axes, axis, tolerance)
        below = compare([*range(low - 1, 0, -1)][:TRIED])
        above = compare([high + 1] if high is not None and high < LONG else [])
        above = "differs" if high is not None and high >= LONG else above
        lowest, highest = low if below else 1, high if above else None
        if lowest > 1 or highest is not None:
            held[limited] = (lowest, highest)
        differs |= "differs" in (below, above)
    return held, differs


def _beyond(model: TensorModel, path: Path, axes: Axes, axis: int, tolerance: float, sizes: list[int]) -> str:
    """Compare a file with its model at some sizes: return "", "differs", or "fails" if the model does."""
    opened = [axis in axes.get(name, ()) for name in model.names]
    result = ""
    for size in sizes:
        given = [resized(t, axis, size) if open_ else t for t, open_ in zip(model.given, opened, strict=True)]
        try:
            with torch.no_grad():
                expected = model.all_outputs(*(t.clone() for t in given))
        except Exception:  # such as beyond its positions
            result = "fails"
            continue
        with suppress(Exception):
            if error(tuple(run(model, path, given)), expected) <= tolerance:
                continue
        return "differs"
    return result


def run(model: TensorModel, path: Path, given: Sequence[Tensor]) -> list[Tensor]:
    """Run a file."""
    if path.suffix == ".pt2":
        found = torch.export.load(path).module()(*given)
        return [found] if isinstance(found, Tensor) else list(found)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = model.feed(given)
    out = session.run(None, {slot.name: feed[slot.name] for slot in session.get_inputs()})
    return [torch.from_numpy(array) for array in out]
