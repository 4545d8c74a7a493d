"""Commands that show results: `report`, `compare`, `figure` and `watch`."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normkit.text import truncate
from normkit_papers.cli.doctor import examine
from normkit_papers.cli.line import check_writable, command, typed, write


@command
def report(paths: tuple[Path, ...], /, out: Path | None = None) -> int:
    """Make the table, figures and a page of finished runs from their result files.

    Args:
        paths: Result files, or folders with such files somewhere inside.
        out: Folder for table, figures and report.html; by default the first path.
    """
    if not paths:
        raise ValueError("no results given; try `normkit report runs/demo`")
    from normkit_papers.report import results

    if out is not None and out.suffix in (".html", ".txt") and not out.is_dir():
        raise ValueError(f"--out {out} would be a folder, for report.html, table.txt and figures; name {out.stem}")
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    check_writable(out or first)
    found = results.find(paths)
    words = [*map(str, paths), *(["--out", str(out)] if out else [])]
    show(found, out or first, typed("report", *words), sections(found, paths))
    return 0


@command
def compare(runs: tuple[Path, ...], /) -> int:
    """Compare runs: intervals over seeds, paired bootstrap of translations.

    All are compared with the first. The intervals compare settings, such as norms; the bootstrap compares two trained
    models.

    Args:
        runs: Folders of runs, or folders that hold one run's seeds.
    """
    if not runs:
        raise ValueError("no run given; try `normkit compare runs/layer runs/un`")
    from normkit_papers.report.compare import compared

    write("\n".join(compared(runs)))
    return 0


@command
def figure(name: str = "", paths: tuple[Path, ...] = (), /, out: Path | None = None) -> int:
    """Draw a figure of the papers from any runs; without a name, list the figures.

    It has the axes of the paper's, and is drawn from result files and recorded rows.

    Args:
        name: Such as pn.figure2; `normkit figure` lists all.
        paths: Result files, or folders with such files somewhere inside.
        out: The figure, .svg or .png; by default NAME.svg.
    """
    from normkit.names import pick
    from normkit_papers import figures
    from normkit_papers.report import results

    if not name:
        write(f"Figures (normkit figure NAME PATHS --out FILE.svg)\n\n{figures.listing()}")
        return 0
    pick(figures.FIGURES, name, "figure")
    if not paths:
        raise ValueError(f"no results given; try `normkit figure {name} runs/demo`")
    found = results.find(paths, unfinished=True)
    out = out or Path(f"{name}.svg")
    check_writable(out.parent)
    made, left_out = figures.draw(name, found, out)
    write(f"figure: {made}")
    if left_out:
        write(
            f"{len(left_out)} of {len(found)} runs are not in it: {'; '.join(truncate(left_out))} (it needs "
            f"{figures.FIGURES[name].needs}; docs/figures.md has the kind and number of runs)"
        )
    return 0


@command
def watch(run: Path, /, port: int = 0) -> int:
    """Show runs in progress on a page that updates itself, on this machine only.

    Serves until Ctrl-C.

    Args:
        run: Folder of a run, or of runs; it may be started, stopped and started again.
        port: Port of the page's address; by default a free one.
    """
    from normkit_papers.report import live

    with live.server(run, port, lambda found, reader: sections(found, (), reader)) as server:
        write(f"watching {run} at http://{live.HERE}:{server.server_address[1]}/ (Ctrl-C ends)")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def sections(found: Mapping[Path, Mapping[str, Any]], paths: tuple[Path, ...] = (), reader: Any = None) -> Any:
    """The content of a page besides results: definitions, findings, tables of studies."""
    from normkit.watch import QUANTITIES, RunReader
    from normkit_papers.report import page, study_tables

    reader, findings, not_checked = reader or RunReader(), {}, {}
    for folder, result in found.items():
        with contextlib.suppress(ValueError):  # no rows, or none yet
            faults, unchecked, advice = examine(reader.read(folder), result)
            nothing = "nothing wrong was found in what was checked" if unchecked else "nothing wrong was found"
            findings[folder], not_checked[folder] = [*(faults or [nothing]), *advice], unchecked
    definitions = {name: f"{one.definition} ({one.source})" for name, one in QUANTITIES.items()}
    return page.PageSections(definitions, findings, not_checked, study_tables.find(paths))


def show(found: dict[Path, dict[str, Any]], out: Path, command: str, more: Any = None) -> None:
    """Print table and conclusions; write them, the figures and the page to a folder."""
    from normkit_papers.report import page, plot, summary

    out.mkdir(parents=True, exist_ok=True)
    text = summary.text(found)
    (out / "table.txt").write_text(text, encoding="utf8")
    write(text)
    for draw in (plot.curves, plot.statistics):
        for ending in ("png", "svg"):
            path = out / f"{draw.__name__}.{ending}"
            try:
                draw(found, path)
            except ValueError:  # nothing to draw, such as statistics of norms without any
                path.unlink(missing_ok=True)  # that of earlier runs
    title, more = out.resolve().name, more or sections(found)
    written = page.write(found, out / "report.html", title=title, command=command, sections=more)
    write(f"report: {written}")
