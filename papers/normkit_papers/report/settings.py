"""Settings of several runs: those that differ, and a label for each run."""

from collections.abc import Iterable, Mapping
from typing import Any

from normkit._util import escape

Result = Mapping[str, Any]
Results = Mapping[Any, Result]
"""Results by the folder of each, as `normkit_papers.results.find` returns them."""

NAMING = {"name", "model.norm", "model.norm_at", "model.fixnorm", "scale_loss", "seed", "task", "data"}
"""Settings that are part of a label already, or do not belong into one."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of settings to dotted names.

    >>> flat({"steps": 10, "model": {"width": 8, "norm_at": {}}})
    {'steps': 10, 'model.width': 8, 'model.norm_at': {}}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and name != "norm_at":
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differing(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings in which trees differ, with the value of each; None where one lacks it.

    >>> differing([{"seed": 0, "steps": 10}, {"seed": 1, "steps": 10}])
    {'seed': [0, 1]}
    """
    levels = [flat(tree) for tree in trees]
    values = {name: [level.get(name) for level in levels] for level in levels for name in level}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def job(result: Result) -> tuple[str, str]:
    """Task and data of a result."""
    return str(result["run"].get("task", "?")), str(result["run"].get("data", "?"))


def labels(results: Results) -> dict[Any, str]:
    """Label each result by its norm, and by the settings that differ between equal norms of one task.

    Seeds of one run share a label.

    >>> labels({1: {"run": {"model": {"norm": "un"}}}, 2: {"run": {"model": {"norm": "scale", "fixnorm": True}}}})
    {1: 'un', 2: 'scale + FixNorm'}
    >>> labels({n: {"run": {"steps": n // 2, "seed": n, "model": {"norm": "un"}}} for n in (2, 3, 4)})
    {2: 'un, steps=1', 3: 'un, steps=1', 4: 'un, steps=2'}
    """
    names: dict[Any, str] = {}
    several = len({job(result) for result in results.values()}) > 1
    for folder, result in results.items():
        model = result["run"].get("model") or {}
        parts = [str(model.get("norm", "?")), *(["FixNorm"] if model.get("fixnorm") else [])]
        parts += ["scale loss"] if result["run"].get("scale_loss") else []
        rules = "; ".join(f"{pattern}: {norm}" for pattern, norm in (model.get("norm_at") or {}).items())
        names[folder] = (
            " + ".join(parts) + (f" ({rules})" if rules else "") + (f", {job(result)[1]}" if several else "")
        )
    same: dict[str, list[Any]] = {}
    for folder, name in names.items():
        same.setdefault(name, []).append(folder)
    for name, folders in same.items():
        different = differing(results[folder]["run"] for folder in folders)
        for place, folder in enumerate(folders):
            more = [f"{key}={values[place]}" for key, values in different.items() if key not in NAMING]
            names[folder] = escape(", ".join([name, *more]))
    return names
