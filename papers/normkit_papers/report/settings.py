"""Settings of several runs: common ones, different ones, and a label for each run."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normkit._util import escape, format_spec
from normkit.norms import parse

Result = Mapping[str, Any]
Results = Mapping[Any, Result]
"""Results by the folder of each, as `normkit_papers.report.results.find` returns them."""

NAMING = {"name", "model.norm", "model.norm_at", "model.fixnorm"}
"""Settings that are part of a label already, or do not matter."""


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


def split(trees: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Split settings into shared ones and the values of others; None if a tree lacks one.

    >>> split([{"seed": 0, "steps": 10}, {"seed": 1, "steps": 10}])
    ({'steps': 10}, {'seed': [0, 1]})
    """
    levels = [flat(tree) for tree in trees]
    names = dict.fromkeys(name for level in levels for name in level)
    common: dict[str, Any] = {}
    different: dict[str, list[Any]] = {}
    for name in names:
        values = [level.get(name) for level in levels]
        if all(value == values[0] for value in values):
            common[name] = values[0]
        else:
            different[name] = values
    return common, different


def groups(results: Results) -> list[dict[Any, Result]]:
    """Group results by task and data: only those of one group can be compared."""
    found: dict[tuple[str, str], dict[Any, Result]] = {}
    for folder, result in results.items():
        found.setdefault(job(result), {})[folder] = result
    return list(found.values())


def job(result: Result) -> tuple[str, str]:
    """Task and data of a result."""
    return str(result["run"].get("task", "?")), str(result["run"].get("data", "?"))


def labels(results: Results) -> dict[Any, str]:
    """Label each result by its norm, and by the settings that differ between equal norms.

    Options that several norms share, such as one length of warm-up, are left out: they are settings, not names.

    >>> labels({1: {"run": {"model": {"norm": "un"}}}, 2: {"run": {"model": {"norm": "scale", "fixnorm": True}}}})
    {1: 'un', 2: 'scale + FixNorm'}
    >>> labels({1: {"run": {"seed": 0, "model": {"norm": "un"}}}, 2: {"run": {"seed": 1, "model": {"norm": "un"}}}})
    {1: 'un, seed=0', 2: 'un, seed=1'}
    >>> labels({1: {"run": {"scale_loss": 0.1, "model": {"norm": "un"}}}})
    {1: 'un + scale loss'}
    """
    if len(kinds := groups(results)) > 1:  # the settings of another task say nothing about equal norms of one
        names = {folder: name for kind in kinds for folder, name in labels(kind).items()}
        for folder in itertools.chain(*_alike(names)):
            names[folder] = escape(f"{names[folder]}, {', '.join(dict.fromkeys(job(results[folder])))}")
        return {folder: names[folder] for folder in results}
    models = {folder: result["run"].get("model") or {} for folder, result in results.items()}
    specs = _short([str(model.get("norm", "?")) for model in models.values()])
    names = {}
    for (folder, model), spec in zip(models.items(), specs, strict=True):
        rules = [f"{pattern}: {norm}" for pattern, norm in (model.get("norm_at") or {}).items()]
        parts = [spec, *(["FixNorm"] if model.get("fixnorm") else [])]
        parts += ["scale loss"] if results[folder]["run"].get("scale_loss") else []
        names[folder] = escape(" + ".join(parts) + (f" ({'; '.join(rules)})" if rules else ""))
    for same in _alike(names):
        _, different = split([results[folder]["run"] for folder in same])
        different = {key: values for key, values in different.items() if key not in NAMING}
        # one setting suffices if it differs between all of them
        telling = [key for key in different if len(set(map(repr, different.get(key, ())))) == len(same)][:1]
        for place, folder in enumerate(same):
            values = {key: different[key][place] for key in telling or different}
            parts = [f"{key}={value}" for key, value in values.items()]
            names[folder] = ", ".join([names[folder], *map(escape, parts)])
    for folder in itertools.chain(*_alike(names)):
        names[folder] = escape(f"{names[folder]}, {folder}")
    return names


def _alike(names: Mapping[Any, str]) -> list[list[Any]]:
    """Folders with the same name, for each name of several."""
    found: dict[str, list[Any]] = {}
    for folder, name in names.items():
        found.setdefault(name, []).append(folder)
    return [folders for folders in found.values() if len(folders) > 1]


def _short(specs: Sequence[str]) -> list[str]:
    """Remove options that norms of different names share, if the specs stay different."""
    parsed = [_parse(spec) for spec in specs]
    given: dict[str, set[tuple[str, str]]] = {}
    for name, options in parsed:
        for key, value in options.items():
            given.setdefault(key, set()).add((name, repr(value)))
    shared = {key for key, uses in given.items() if len({n for n, _ in uses}) > 1 and len({v for _, v in uses}) == 1}
    short = [format_spec(name, {k: v for k, v in options.items() if k not in shared}) for name, options in parsed]
    return short if len(set(short)) == len(set(specs)) else list(specs)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    try:
        return parse(spec)
    except ValueError:  # a norm of another version
        return spec, {}
