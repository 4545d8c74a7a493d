"""`normkit list`: norms, recipes and data."""

import importlib.metadata
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from normkit._util import align
from normkit.norms import NORMS, make, options
from normkit_papers.cli.line import command, write

TASK_EXTRAS = {"mt": "text", "images": "vision", "detection": "vision"}  # beside `demo`, which all tasks need


@command
def list_() -> int:
    """List norms with their options, recipes of `normkit train`, and data.

    For each recipe, the list shows if this machine can run it: its packages, its data, and a GPU where it needs one.
    """
    from normkit_papers.data.corpora import CORPORA, locate
    from normkit_papers.data.embedded import SOURCES
    from normkit_papers.data.images import IMAGE_SETS, find_images
    from normkit_papers.data.scenes import SCENE_SETS, find_scenes
    from normkit_papers.studies.catalogue import RECIPES

    recipes = [(name, _obstacle(recipe) or "runs here", summary(recipe)) for name, recipe in RECIPES.items()]
    sections = (
        ("Recipes (normkit train RECIPE)", recipes),
        ("Data that installs with packages", [(name, summary(source)) for name, source in SOURCES.items()]),
        ("Corpora, found through NORMKIT_DATA", _found(CORPORA, locate)),
        ("Images, found through NORMKIT_DATA", _found(IMAGE_SETS, find_images)),
        ("Images with boxes, found through NORMKIT_DATA", _found(SCENE_SETS, find_scenes)),
    )
    lines = ["Norms: a spec is a name, or a name with options as in 'un(window=8)'", "", *_norms()]
    for title, rows in sections:
        lines += ["", title, "", textwrap.indent(align(rows), "  ")]
    write("\n".join(lines))
    return 0


def _found(table: Mapping[str, Any], find: Callable[[str], Any]) -> list[tuple[str, str]]:
    """Return each data set with "here" and what is missing, or with where to get it."""
    rows = []
    for name, each in table.items():
        try:
            partial = getattr(find(name), "partial", "")  # of corpora
            rows.append((name, f"here, {partial}" if partial else "here"))
        except ValueError:
            rows.append((name, f"not here; {each.origin}"))
    return rows


def summary(documented: Any) -> str:
    """Return the first line of a docstring."""
    return str(documented.__doc__).splitlines()[0]


def _norms() -> Iterator[str]:
    common, width = options("layer").items(), max(map(len, NORMS))
    for name, kind in NORMS.items():
        offline, batch, own = make(name, 16).offline, not kind.batch_free, options(name)
        if offline:
            inference = "folds away at inference"
        elif batch and "groups" in own:
            inference = "folds away with groups=0"
        else:
            inference = "folds away after its schedule" if "until" in own else "stays at inference"
        each = "per sample" if "over" in vars(kind) and "over" not in own else "per token"
        yield f"  {name:<{width}}  {kind.__name__}: {'batch statistics' if batch else each}, {inference}"
        indent = " " * (width + 6)
        text = ", ".join(f"{key}={value!r}" for key, value in own.items() if (key, value) not in common)
        yield from textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent)
    yield "  weight_norm, spectral_norm, fix_embedding: parametrizations of weights, no specs; weights fold into layers"
    yield f"  defaults of options that all norms have: {', '.join(f'{key}={value!r}' for key, value in common)}"


def _obstacle(recipe: Callable[[], Any]) -> str:
    """Name what this machine lacks to run a recipe: packages, data or a GPU; empty if nothing."""
    run = recipe()
    for extra in ("train", TASK_EXTRAS.get(run.task, "data")):
        if not _installed(extra):
            return f"needs normkit[{extra}]"
    from normkit_papers.train.source import source

    try:
        source(run)
    except ValueError:
        return "no data here"
    import torch

    cost = re.search(r"Cost: ([^.]*)", str(recipe.__doc__))
    return "needs a GPU" if cost and "GPU" in cost[1] and not torch.cuda.is_available() else ""


def _installed(extra: str) -> bool:
    """Check if the packages of an extra are installed."""
    try:
        required = importlib.metadata.requires("normkit") or []
    except importlib.metadata.PackageNotFoundError:  # used from a checkout without installation
        return True
    names = [re.split(r"[\s\[<>=!~;]", line)[0] for line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return all(any(importlib.metadata.distributions(name=name)) for name in names)
