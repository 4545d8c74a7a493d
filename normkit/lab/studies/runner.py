"""Run a study: what is finished is kept, what was interrupted goes on, what failed is a row."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.files import write_whole
from normkit.lab.data.corpora import CORPORA, locate
from normkit.lab.report import results
from normkit.lab.studies.progress import Board
from normkit.lab.studies.study import Study, expand, seeded, unique
from normkit.lab.studies.table import FAILURE, Table, check, collect, write
from normkit.lab.studies.workers import Workers, on_devices, train_job
from normkit.lab.train.config import Run

if TYPE_CHECKING:
    from normkit.lab.studies.ray_workers import Cluster

    Engine = Workers | Cluster  # what runs jobs: submit, ended, stop


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """Runs of a study by their folders: those to train, in this order; how many are finished; what data is missing."""

    todo: dict[Path, Run]
    finished: int
    missing: tuple[str, ...] = ()
    """A line for each source of data that is not here, at scale paper not as a whole, whose runs are left out."""


def plan(study: Study, scale: str, out: Path, *, seeds: int = 1, only: Sequence[str] = ()) -> StudyPlan:
    """What is left to train, seed by seed so that a table is whole early.

    ValueError where nothing can be run at this scale, or no data is here, or a folder holds a run of other settings.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1; got {seeds}")
    cells = unique(expand(study, scale, only))
    printed = [row.label for row in study.rows if row.settings is None and row.label in only]
    if not cells and printed:
        raise ValueError(
            f"{', '.join(printed)} of {study.id}: the paper's figures alone are shown, normkit has no such method or "
            "training; --only takes rows that can be run"
        )
    if not cells:
        there = ", ".join(study.scales) or "none: it shows the paper's figures alone"
        raise ValueError(f"{study.id} has no runs at scale {scale} here; scales with runs: {there}")
    runs = dict(seeded(cell, out, seed) for seed in range(seeds) for cell in cells)
    todo = {folder: run for folder, run in runs.items() if not finished(folder, run)}
    one_each = {run.data: run for run in todo.values()}
    missing = {data: why for data, run in one_each.items() if (why := _absence(run, whole=scale == "paper"))}
    if missing and len(missing) == len({run.data for run in runs.values()}):
        raise ValueError("; ".join(missing.values()))
    kept = {folder: run for folder, run in todo.items() if run.data not in missing}
    return StudyPlan(kept, len(runs) - len(todo), tuple(missing.values()))


def _absence(run: Run, whole: bool) -> str:
    """Why the data of a run cannot be read, or with `whole` is a part of the corpus; empty where all is well."""
    from normkit.lab.train.source import source

    try:
        source(run, lambda _: None)
    except ValueError as error:
        return str(error)
    if whole and run.data in CORPORA and (part := locate(run.data).partial):
        return (
            f"the corpus {run.data} is here in part alone ({part}), and scale paper is the original setting; "
            f"get the rest from {CORPORA[run.data].origin}, or take another scale"
        )
    return ""


def finished(folder: Path, run: Run) -> bool:
    """Whether a folder holds this run's result: scores, or a divergence. ValueError where it is another run's."""
    if not (folder / results.FILE).is_file():
        return False
    result = results.read(folder)
    check(folder, result["run"], run)
    return not result["status"].startswith("interrupted")


def engine(plan: StudyPlan, processes: int, ray: str | None, board: Board) -> "Engine":
    """What to train a plan with: processes here, or Ray at an address. ValueError where a GPU is missing here."""
    if ray is not None:
        from normkit.lab.studies.ray_workers import Cluster

        return Cluster(ray)
    if any(run.device == "cuda" for run in plan.todo.values()):
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "this scale needs a GPU, and none is here; --scale pocket does not, --ray ADDRESS may have"
            )
    return Workers(processes, board.tell)


def run_study(
    study: Study, scale: str, out: Path, plan: StudyPlan, engine: "Engine", board: Board, command: str = ""
) -> tuple[Table, bool]:
    """Train what a plan has left; returns the table of all that is there, and whether it was interrupted.

    After each run the table's files are written anew. A run that raised leaves failed.txt, is tried again next time.
    """
    interrupted = False
    folders = {run.name: folder for folder, run in plan.todo.items()}
    for folder, run in plan.todo.items():
        engine.submit(run.name, study_job, run, folder, command)
    try:
        _collect(study, scale, out, engine, board, folders)
    except KeyboardInterrupt:
        interrupted = True
        board.say("stopping; what is finished is kept, the rest goes on from here next time (Ctrl-C again: at once)")
        engine.stop()
        _collect(study, scale, out, engine, board, folders)
    table = collect(study, scale, out)
    write(table, out)
    return table, interrupted


def _collect(study: Study, scale: str, out: Path, engine: "Engine", board: Board, folders: dict[str, Path]) -> None:
    for title, outcome in engine.ended():
        if isinstance(outcome, BaseException):
            ending = f"failed: {' '.join(str(outcome).split()) or type(outcome).__name__}"
            write_whole(folders[title] / FAILURE, f"{ending[:300]}\n".encode())
        else:
            ending = outcome["status"]
            (folders[title] / FAILURE).unlink(missing_ok=True)
        board.end(title, ending)
        write(collect(study, scale, out), out)


def study_job(title: str, run: Run, folder: Path, command: str) -> dict[str, Any]:
    """A worker's job: train, or go on where it stopped, telling the parent; its checkpoints go when it is finished."""
    on_devices(run.devices, train_job, title, run, folder, command, True)
    result = results.read(folder)
    if not result["status"].startswith("interrupted"):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result
