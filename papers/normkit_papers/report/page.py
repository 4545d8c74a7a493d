"""One self-contained page of results, with table, charts, folding, settings and origin.

The page draws its charts with its own script rather than a plotting library; docs/architecture.md gives the reasons. A
policy in the page allows this script, by its hash, and no other, and forbids loading anything.
"""

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normkit._util import truncate, write_whole
from normkit.watch.row_files import RunReader
from normkit_papers.report import study_tables, summary
from normkit_papers.report.curves import losses, thin
from normkit_papers.report.panels import Panel, panels
from normkit_papers.report.seeds import CONFIDENT, pool
from normkit_papers.report.settings import Results, groups, job, labels, split
from normkit_papers.report.verdict import sentences

TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 3_000_000  # bytes of a page
FEWEST = 6
POINTS = (400, 200, 100, 50, 25, 12, FEWEST, 0)  # in a line, until the page is small enough; 0: no statistics
CROWDED = "Statistics by layer are left out, for they would make this page larger than 3 MB: show fewer runs."
COLOURS = 7
DIGITS = 4  # of numbers in charts


class PageSections(NamedTuple):
    """Content of a page besides results.

    Attributes:
        definitions: Definition of each recorded quantity.
        findings: Findings of the diagnosis, by run.
        unchecked: Checks that could not be made, by run.
        studies: Tables of studies; see `normkit_papers.report.study_tables`.
    """

    definitions: Mapping[str, str] = {}
    findings: Mapping[Path, Sequence[str]] = {}
    unchecked: Mapping[Path, Sequence[str]] = {}
    studies: Sequence[Mapping[str, Any]] = ()


NO_SECTIONS = PageSections()


def write(
    results: Results,
    path: str | Path,
    *,
    title: str = "normkit report",
    command: str = "",
    sections: PageSections = NO_SECTIONS,
) -> Path:
    """Write a page that loads nothing, is below 3 MB, and shows content of files as text.

    Args:
        results: Results by folder.
        path: File to write.
        title: Title of the page.
        command: Command line that makes everything again.
        sections: Further content.

    Raises:
        ValueError: without results, or for a file of rows that cannot be read.
    """
    return write_whole(Path(path), page(results, title, command, sections))


def page(
    results: Results,
    title: str,
    command: str = "",
    sections: PageSections = NO_SECTIONS,
    live: bool = False,
    reader: RunReader | None = None,
    notes: Sequence[str] = (),
) -> bytes:
    """Make the page, with lines as dense as its size allows; a `live` page updates itself."""
    if not results:
        raise ValueError("no results to show; give at least one")
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names, pooled, charts = labels(results), pool(results), panels(results, None, reader)
    seeds = len(pooled) < len(results)
    scripts = [(TEMPLATES / name).read_text(encoding="utf8") for name in ("page.js", "live.js")[: 1 + live]]
    same, different = split([result["run"] for result in results.values()])
    here, elsewhere = split([result["where"] for result in results.values()])
    render = functools.partial(
        environment.get_template("page.html.j2").render,
        title=title,
        live=live,
        command=command,
        tables=[*_tables(pooled, "means over seeds: "), *_tables(results)] if seeds else _tables(results),
        findings=_by_sentence(sections.findings, names),
        unchecked=_by_sentence(sections.unchecked, names),
        studies=[study_tables.shown(table) for table in sections.studies],
        folds=[_fold(names[folder], result["fold"]) for folder, result in results.items() if result.get("fold")],
        timings=[result["timing"] for result in results.values() if result.get("timing")],
        runs=list(names.values()),
        commands={names[folder]: result["command"] for folder, result in results.items() if result["command"]},
        seconds={names[folder]: result["seconds"] for folder, result in results.items()},
        same=_texts(same),
        different={name: list(map(_text, values)) for name, values in different.items() if name != "name"},
        here=_texts(here),
        elsewhere={name: list(map(_text, values)) for name, values in elsewhere.items()},
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf8")),
        scripts=[Markup(script) for script in scripts],
        digests=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
    )
    conclusions = [*notes, *sentences(pooled)]
    for points in POINTS:
        data = _data(results, charts if points else (), names, sections, points or FEWEST)
        made = render(
            conclusions=[*conclusions, *([] if points or not charts else [CROWDED])],
            has_curves=bool(data["curves"]),
            has_statistics=bool(data["statistics"]),
            data=Markup(as_script(data)),
        ).encode("utf8", "replace")
        if len(made) < LIMIT:
            return made
    raise ValueError(f"a page of {len(results)} results would be larger than {LIMIT / 1e6:.0f} MB; show fewer")


def as_script(data: Any) -> str:
    r"""Format data as JSON that cannot end the script element of a page.

    >>> as_script({"norm": "</script>"})
    '{"norm":"\\u003c/script>"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _by_sentence(lines: Mapping[Path, Sequence[str]], names: dict[Any, str]) -> dict[str, list[str]]:
    """The labels of the runs that a sentence is about, by sentence."""
    about: dict[str, list[str]] = {}
    for folder, found in lines.items():
        for sentence in found if folder in names else ():
            about.setdefault(sentence, []).append(names[folder])
    return {sentence: truncate(runs) for sentence, runs in about.items()}


def _tables(results: Results, lead: str = "") -> list[dict[str, Any]]:
    """The tables of results, one for each task and data."""
    names = labels(results)
    return [_table(group, names, lead) for group in groups(results)]


def _table(group: Results, names: dict[Any, str], lead: str) -> dict[str, Any]:
    columns, best = summary.columns(group), summary.best(group)
    rows = [
        [
            {
                "text": cell.text.split(" \u00b1")[0],
                "value": "" if cell.value is None else repr(cell.value),
                "error": "" if cell.error is None else f"{CONFIDENT * cell.error:.2g}",
                "best": (folder, column.title) in best,
            }
            for column, cell in ((column, column.cell(result)) for column in columns)
        ]
        for folder, result in group.items()
    ]
    return {
        "name": lead + " on ".join(job(next(iter(group.values())))),
        "columns": columns,
        "rows": list(zip((names[folder] for folder in group), rows, strict=True)),
    }


def _data(
    results: Results, charts: Sequence[Panel], names: dict[Any, str], sections: PageSections, points: int
) -> dict[str, Any]:
    """The data of the page's script: runs, charts of losses, statistics by quantity."""
    number = {Path(folder): place for place, folder in enumerate(results)}
    found = [losses(result) for result in results.values()]
    curves = []
    for title in ("training loss", "validation loss"):
        lines = [
            {"run": run, "name": "", "x": thin(steps, points), "y": list(map(_round, thin(values, points)))}
            for run, (steps, values) in enumerate(by[title] for by in found)
            if len(steps) > 1
        ]
        if lines:
            curves.append({"title": title.capitalize(), "lines": lines})
    quantities: dict[str, list[dict[str, Any]]] = {}
    for panel in charts:
        sites = {site: list(map(_round, thin(values, points))) for site, values in panel.sites.items()}
        one = {"run": number[panel.folder], "x": thin(panel.steps, points), "sites": sites}
        quantities.setdefault(panel.quantity, []).append(one)
    return {
        "runs": [
            {"name": name, "colour": i % COLOURS, "dash": i // COLOURS % 4} for i, name in enumerate(names.values())
        ],
        "curves": curves,
        "statistics": [
            {"name": name, "about": sections.definitions.get(name, ""), "panels": found}
            for name, found in quantities.items()
            if not name.endswith("]")  # measured once, at the end of training, such as singular_value[3]
        ],
    }


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _fold(name: str, fold: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "foldable": fold.get("foldable") or summary.NONE,
        "errors": [
            summary.NONE if fold.get(kind) is None else f"{fold[kind]:.1e}" for kind in ("max_error", "native_error")
        ],
        "rows": [{**row, "into": ", ".join(map(str, row.get("into") or []))} for row in fold.get("rows") or []],
    }


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in settings.items()}


def _text(value: Any) -> str:
    """Format a setting."""
    if value is None:
        return summary.NONE
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or summary.NONE
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_text(inner)}" for key, inner in value.items()) or summary.NONE
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
