"""One self-contained page of results: table, curves, statistics, the papers' figures, folding, settings, origin.

The page draws its charts with its own script rather than a plotting library: docs/architecture.md says why. A policy in
the page lets nothing run but this script, by its hash, and lets nothing be loaded at all.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normkit.files import write_whole
from normkit.lab.report import rows, study_tables, summary
from normkit.lab.report.curves import losses, thin
from normkit.lab.report.settings import Results, groups, job, labels, split
from normkit.lab.report.verdict import sentences
from normkit.text import truncate

TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 3_000_000  # bytes of a page
FEWEST = 6
POINTS = (400, 200, 100, 50, 25, 12, FEWEST, 0)  # of a line at most, until the page is small enough; 0: no statistics
CROWDED = "Statistics by layer are left out, for they would make this page larger than 3 MB: show fewer runs."
COLOURS = 7
CONFIDENT = 1.96  # sampling errors to each side hold a figure in 95 of 100 cases
DIGITS = 4  # of numbers in charts


class Extras(NamedTuple):
    """What a page shows besides results, all of it text from elsewhere; by folder where it is of a run."""

    definitions: Mapping[str, str] = {}
    """What a recorded quantity is, in a sentence."""
    findings: Mapping[Path, Sequence[str]] = {}
    """What was diagnosed of a run."""
    unchecked: Mapping[Path, Sequence[str]] = {}
    """What could not be."""
    studies: Sequence[Mapping[str, Any]] = ()
    """Tables of studies, see `normkit.lab.report.study_tables`."""


NOTHING = Extras()


def write(
    results: Results, path: str | Path, *, title: str = "normkit report", command: str = "", extras: Extras = NOTHING
) -> Path:
    """Write a page of results, by the folder of each; `command` is what a person types to make it all again.

    The page loads nothing, stays below 3 MB (lines are thinned where there are many), and has the bytes of the results
    only as text. ValueError without results, or for a file of rows that cannot be read.
    """
    return write_whole(Path(path), page(results, title, command, extras))


def page(
    results: Results,
    title: str,
    command: str = "",
    extras: Extras = NOTHING,
    live: bool = False,
    reader: rows.Reader | None = None,
) -> bytes:
    """The page, with as many points to a line as its size allows; a `live` one asks its server for itself again."""
    if not results:
        raise ValueError("no results to show; give at least one")
    panels = rows.panels(results, None, reader)
    for points in POINTS:
        data = _page(results, panels, title, command, extras, live, points).encode("utf8", "replace")
        if len(data) < LIMIT:
            return data
    raise ValueError(f"a page of {len(results)} results would be larger than {LIMIT / 1e6:.0f} MB; show fewer")


def _page(
    results: Results,
    panels: Sequence[rows.Panel],
    title: str,
    command: str,
    extras: Extras,
    live: bool,
    points: int,
) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = labels(results)
    data = _data(results, panels if points else (), names, extras, points or FEWEST)
    scripts = [(TEMPLATES / name).read_text(encoding="utf8") for name in ("page.js", "live.js")[: 1 + live]]
    same, different = split([result["run"] for result in results.values()])
    here, elsewhere = split([result["where"] for result in results.values()])
    return environment.get_template("page.html.j2").render(
        title=title,
        live=live,
        command=command,
        tables=[_table(group, names) for group in groups(results)],
        seen=[*sentences(results), *([] if points or not panels else [CROWDED])],
        has_curves=bool(data["curves"]),
        has_statistics=bool(data["statistics"]),
        data=Markup(as_script(data)),
        findings=_said(extras.findings, names),
        unchecked=_said(extras.unchecked, names),
        studies=[study_tables.shown(table) for table in extras.studies],
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


def as_script(data: Any) -> str:
    """Data as JSON that is safe inside a script element of a page: nothing in it can end the element.

    >>> as_script({"norm": "</script>"})
    '{"norm":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _said(lines: Mapping[Path, Sequence[str]], names: dict[Any, str]) -> dict[str, list[str]]:
    """Each sentence once, with the runs that it is about."""
    said: dict[str, list[str]] = {}
    for folder, found in lines.items():
        for sentence in found if folder in names else ():
            said.setdefault(sentence, []).append(names[folder])
    return {sentence: truncate(about) for sentence, about in said.items()}


def _table(group: Results, names: dict[Any, str]) -> dict[str, Any]:
    """The headline table of one task."""
    columns, best = summary.columns(group), summary.best(group)
    rows = [
        [
            {
                "text": cell.text,
                "value": "" if cell.value is None else repr(cell.value),
                "error": "" if cell.error is None else f"{CONFIDENT * cell.error:.2g}",
                "best": (folder, column.title) in best,
            }
            for column, cell in ((column, column.cell(result)) for column in columns)
        ]
        for folder, result in group.items()
    ]
    return {
        "name": " on ".join(job(next(iter(group.values())))),
        "columns": columns,
        "rows": list(zip((names[folder] for folder in group), rows, strict=True)),
    }


def _data(
    results: Results, panels: Sequence[rows.Panel], names: dict[Any, str], extras: Extras, points: int
) -> dict[str, Any]:
    """What the page's script draws: runs with a colour each, charts of losses, statistics by quantity."""
    number = {Path(folder): place for place, folder in enumerate(results)}
    found = [losses(result) for result in results.values()]
    curves = []
    for title in ("training loss", "validation loss"):
        lines = [_line(run, "", *by[title], points) for run, by in enumerate(found) if len(by[title][0]) > 1]
        if lines:
            curves.append({"title": title.capitalize(), "lines": lines})
    quantities: dict[str, list[dict[str, Any]]] = {}
    for panel in panels:
        sites = {site: [_round(value) for value in thin(values, points)] for site, values in panel.sites.items()}
        one = {"run": number[panel.folder], "x": thin(panel.steps, points), "sites": sites}
        quantities.setdefault(panel.quantity, []).append(one)
    return {
        "runs": [
            {"name": name, "colour": i % COLOURS, "dash": i // COLOURS % 4} for i, name in enumerate(names.values())
        ],
        "curves": curves,
        "statistics": [
            {"name": name, "about": extras.definitions.get(name, ""), "panels": found}
            for name, found in quantities.items()
            if not name.endswith("]")  # numbers of an end of training, such as singular_value[3], are no course
        ],
    }


def _line(run: int, name: str, steps: Sequence[int], values: Sequence[float | None], points: int) -> dict[str, Any]:
    return {"run": run, "name": name, "x": thin(steps, points), "y": [_round(value) for value in thin(values, points)]}


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _fold(name: str, fold: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "foldable": fold.get("foldable") or summary.NONE,
        "errors": [_error(fold.get(kind)) for kind in ("max_error", "native_error")],
        "rows": [{**row, "into": ", ".join(map(str, row.get("into") or []))} for row in fold.get("rows") or []],
    }


def _error(value: float | None) -> str:
    return summary.NONE if value is None else f"{value:.1e}"


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in settings.items()}


def _text(value: Any) -> str:
    """A setting as people write it."""
    if value is None:
        return summary.NONE
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or summary.NONE
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_text(inner)}" for key, inner in value.items()) or summary.NONE
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
