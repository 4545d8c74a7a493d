"""What the site builds itself: formulas as MathML, the reference, and tables of recorded quantities and of results."""

import csv
import html
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import normkit
from normkit.watch import QUANTITIES, THRESHOLDS

ROOT = Path(__file__).parents[1]
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
GROUPS = {  # heading of the reference: package of the names below it
    "Models": "normkit.models", "Folding": "normkit.fold", "Removal": "normkit.removal", "Watching": "normkit.watch",
    "Norms": "normkit.norms", "Kernels": "normkit.kernels",
}  # fmt: skip


def on_page_content(content: str, **_: object) -> str:
    """Replace every formula that `pymdownx.arithmatex` marked, so that pages need no script to show it."""
    return FORMULA.sub(lambda m: convert(html.unescape(m[3]), display="inline" if m[2] == "(" else "block"), content)


def on_config(config: Any) -> None:
    """List the pages of the norms in the order of NORMS."""
    section = next(entry for entry in config.nav if "Norms" in entry)
    section["Norms"] = [{name: f"norms/{name}.md"} for name in normkit.NORMS] + section["Norms"]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of docstrings and tables."""
    for name, text in (("reference.md", reference()), ("quantities.md", quantities()), ("measurements.md", measured())):
        files.append(File.generated(config, name, content=text))
    return files


def reference() -> str:
    """The public names, each with its docstring, by package."""
    lines = ["# Reference", "", "All public names of `normkit`, `import normkit as nk`."]
    things = [getattr(normkit, name) for name in normkit.__all__]
    for heading, package in GROUPS.items():
        lines += ["", f"## {heading}"]
        for thing in things:
            if (inspect.getmodule(thing) or normkit).__name__.startswith(package) and hasattr(thing, "__qualname__"):
                lines += ["", f"::: {thing.__module__}.{thing.__qualname__}"]
    return "\n".join(lines)


def quantities() -> str:
    """The recorded quantities and the limits of the checks."""
    recorded = [(f"`{key}`", q.definition, q.source, "" if q.expensive else "yes") for key, q in QUANTITIES.items()]
    limits = [(f"`{key}`", f"{limit.value:g}", limit.meaning) for key, limit in THRESHOLDS.items()]
    lines = ["# Recorded quantities", ""]
    lines += ["`normkit.record(model, quantities=[...])` records these of every norm; `normkit.diagnose` checks them."]
    lines += ["[Find out why training fails](guides/diagnose.md) shows both.", ""]
    lines += table(("quantity", "definition", "source", "default"), recorded)
    lines += ["", "## Limits of the checks", "", *table(("limit", "value", "meaning"), limits)]
    return "\n".join(lines)


def measured() -> str:
    """The files of benchmarks/results as tables."""
    lines = ["# Measurements", "", "Each table is a file of `benchmarks/results`, as its script writes it."]
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.csv")):
        with path.open(encoding="utf8", newline="") as file:
            head, *rows = csv.reader(file)
        lines += ["", f"## {path.relative_to(ROOT / 'benchmarks' / 'results').with_suffix('')}", "", *table(head, rows)]
    return "\n".join(lines)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table."""
    head = list(head)
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]
