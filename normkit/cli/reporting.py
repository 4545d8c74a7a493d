"""Commands that show results: `report`, `figure` and `watch`."""

import contextlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normkit.cli.doctor import examine
from normkit.cli.line import parse_arguments, typed, write


def report(arguments: list[str]) -> int:
    """Table, pictures and a page of results that are there."""
    from tyro.conf import Positional

    def parse(paths: Positional[tuple[Path, ...]], out: Path | None = None) -> dict[str, Any]:
        """Make table, pictures and report.html of finished runs, from their result files alone.

        Args:
            paths: Result files, or folders with such files somewhere inside.
            out: Folder for table, pictures and page; the first path unless said otherwise.
        """
        return locals()

    given = parse_arguments(parse, arguments, "report")
    if not given["paths"]:
        raise ValueError("no results given; try `normkit report runs/demo`")
    from rich.console import Console

    from normkit.lab.report import results

    paths = given["paths"]
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    found = results.find(paths)
    show(Console(), found, given["out"] or first, typed("report", *arguments), extras(found, paths))
    return 0


def figure(arguments: list[str]) -> int:
    """Draw a figure of the papers from runs of one's own; without a name, list the figures."""
    from tyro.conf import Positional

    def parse(name: Positional[str], paths: Positional[tuple[Path, ...]], out: Path | None = None) -> dict[str, Any]:
        """Draw a figure of the papers, with its axes, from result files and what was recorded beside them.

        Args:
            name: As pn.figure2; `normkit figure` lists all.
            paths: Result files, or folders with such files somewhere inside.
            out: The picture, .svg or .png; NAME.svg unless said otherwise.
        """
        return locals()

    from normkit.lab.report import figures, results
    from normkit.names import pick

    if not arguments:
        write(f"Figures (normkit figure NAME PATHS --out FILE.svg)\n\n{figures.listing()}")
        return 0
    given = parse_arguments(parse, arguments, "figure")
    pick(figures.FIGURES, given["name"], "figure")
    if not given["paths"]:
        raise ValueError(f"no results given; try `normkit figure {given['name']} runs/demo`")
    found = results.find(given["paths"], unfinished=True)
    made = figures.draw(given["name"], found, given["out"] or Path(f"{given['name']}.svg"))
    write(f"figure: {made}")
    return 0


def watch(arguments: list[str]) -> int:
    """Show runs in progress on a page that updates itself, on this machine alone."""
    from tyro.conf import Positional

    def parse(run: Positional[Path], port: int = 0) -> tuple[Path, int]:
        """Serve the page of a run, or of all runs in a folder, while they train: to this machine alone, until Ctrl-C.

        Args:
            run: Folder of a run, or of runs; it may be started, stopped and started again.
            port: Port of the page's address; a free one unless said otherwise.
        """
        return run, port

    folder, port = parse_arguments(parse, arguments, "watch")
    from normkit.lab.report import live

    with live.server(folder, port, lambda found, reader: extras(found, (), reader)) as server:
        write(f"watching {folder} at http://{live.HERE}:{server.server_address[1]}/ (Ctrl-C ends)")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def extras(found: Mapping[Path, Mapping[str, Any]], paths: tuple[Path, ...] = (), reader: Any = None) -> Any:
    """What a page shows besides results: definitions of quantities, findings, tables of studies."""
    from normkit.lab.report import page, rows, study_tables
    from normkit.watch import QUANTITIES
    from normkit.watch.series import Series

    reader, findings, untold = reader or rows.Reader(), {}, {}
    for folder in found:
        with contextlib.suppress(ValueError):  # no rows there, or none yet
            recorded, table = reader.read(folder), {}
            for (quantity, site), by_step in recorded.values.items():
                values = [math.nan if value is None else value for value in by_step.values()]
                table.setdefault(quantity, {})[site] = Series(recorded.norms[site], list(by_step), values)
            wrong, unchecked, advice = examine(table)
            nothing = "nothing wrong was found in what was checked" if unchecked else "nothing wrong was found"
            findings[folder], untold[folder] = [*(wrong or [nothing]), *advice], unchecked
    definitions = {name: f"{one.definition} ({one.source})" for name, one in QUANTITIES.items()}
    return page.Extras(definitions, findings, untold, study_tables.find(paths))


def show(console: Any, found: dict[Path, dict[str, Any]], out: Path, command: str, more: Any = None) -> None:
    """Print the table and what is seen in it; write them, the pictures and the page to a folder."""
    from rich.table import Table

    from normkit.lab.report import page, plot, settings, summary

    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text(summary.text(found), encoding="utf8")
    if console.is_terminal and len(settings.groups(found)) == 1:
        head, *rows = summary.cells(found)
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(summary.verdict(found), markup=False, highlight=False, soft_wrap=True)
    else:
        write(summary.text(found))
    for draw in (plot.curves, plot.statistics):
        with contextlib.suppress(ValueError):  # nothing to draw, as the statistics of norms that have none
            for ending in ("png", "svg"):
                draw(found, out / f"{draw.__name__}.{ending}")
    written = page.write(found, out / "report.html", title=out.name, command=command, extras=more or extras(found))
    console.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)
