"""`normkit study`: run a study."""

import itertools
from pathlib import Path
from typing import Any

from normkit_papers.cli.line import (
    INTERRUPTED,
    check_seeds,
    check_writable,
    parse_arguments,
    progress_console,
    typed,
    write,
)


def study(arguments: list[str]) -> int:
    """Run a paper's table or figure as a grid of runs, and compare with its printed figures."""

    def parse(
        study: str = "",
        /,
        list_: bool = False,
        scale: str = "pocket",
        seeds: int = 1,
        only: tuple[str, ...] = (),
        out: Path = Path("runs/studies"),
        processes: int = 1,
        ray: str | None = None,
        show: bool = False,
    ) -> dict[str, Any]:
        """Run a study, a table or figure of a paper, and compare with the printed figures.

        The same command again continues a study: finished runs are kept, interrupted runs resume. Studies share the
        runs that they have in common.

        Args:
            study: Name of the study; --list shows all.
            list_: List all studies with the scales at which they can be run, and exit.
            scale: pocket (two CPU cores, minutes a run), gpu (one GPU, ten minutes a run) or paper (the original).
            seeds: Runs of each cell, with seeds 0, 1, ...
            only: Labels of the rows to run, or norms, for all rows with a norm if no row has this label; default: all.
                The table shows all finished runs.
            out: Folder of runs and tables.
            processes: Runs at the same time on this machine; at scale pocket each has one thread.
            ray: Run on Ray at this address, or on a local Ray without one: one run per free core or GPU.
            show: Show the table of finished runs, and run nothing.
        """
        return locals()

    words = [
        part
        for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-")
        for part in ([word, "local"] if word == "--ray" and following.startswith("-") else [word])
    ]
    given = parse_arguments(parse, words, "study")
    from normkit._util import pick
    from normkit_papers.studies.catalogue import STUDIES, listing

    if given["list_"] or not given["study"]:
        write(listing())
        return 0
    pick(STUDIES, given["study"], "study")
    return _study(given, typed("study", *arguments))


def _study(given: dict[str, Any], command: str) -> int:
    from normkit_papers.cli.reporting import sections
    from normkit_papers.report import page, results, study_tables
    from normkit_papers.studies import runner, table
    from normkit_papers.studies.catalogue import STUDIES
    from normkit_papers.studies.progress import Board

    study, scale, out = STUDIES[given["study"]], given["scale"], given["out"]
    if given["processes"] < 1:
        raise ValueError(f"processes must be at least 1; got {given['processes']}")
    check_seeds(given["seeds"])
    runner.expand(study, scale, given["only"])  # checks the names
    if given["show"]:
        write(table.text(table.collect(study, scale, out)))
        if scale not in study.scales:
            write(f"It can be run at scale: {', '.join(study.scales) or 'none yet'}.")
        if not (out / scale).is_dir():
            write(f"No folder {out / scale}: name the folder of the runs with --out.")
        return 0
    plan = runner.plan(study, scale, out, seeds=given["seeds"], only=given["only"])
    check_writable(out)
    with Board(progress_console(), [run.name for run in plan.todo.values()], 1) as board:
        board.print(f"{len(plan.todo)} runs to train, {plan.finished} finished before")
        for reason in plan.missing:
            board.print(f"left out: {reason}")
        with runner.engine(plan, given["processes"], given["ray"], board) as engine:
            made, interrupted = runner.run_study(study, scale, out, plan, engine, board, command)
    write(table.text(made))
    tables = out / scale / "tables"
    write(f"written to {tables / study.id}.txt, .md and .json")
    runs = [run for row in made["rows"] for cell in row["cells"] for run in cell["runs"]]
    folders = {out / run["folder"] for run in runs}
    if finished := sorted(folder for folder in folders if (folder / results.FILE).is_file()):
        found = results.find(finished)
        more = sections(found)._replace(studies=[study_tables.read(tables / f"{study.id}.json")])
        written = page.write(found, tables / f"{study.id}.html", title=study.id, command=command, sections=more)
        write(f"report: {written}")
    failed = any(run["status"].startswith("failed") for run in runs)
    return INTERRUPTED if interrupted else 1 if failed else 0
