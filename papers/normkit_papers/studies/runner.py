"""Run a study: keep finished runs, resume interrupted ones, show failed ones."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit._util import write_whole
from normkit_papers.data.corpora import CORPORA, locate
from normkit_papers.report import results
from normkit_papers.studies.progress import Board
from normkit_papers.studies.similarity import add_similarity
from normkit_papers.studies.table import FAILURE, Table, check, collect, write
from normkit_papers.studies.workers import Workers, on_devices, train_job
from normkit_papers.study import Study, expand, seeded, unique
from normkit_papers.train.config import Run
from normkit_papers.train.folder import Locked, load
from normkit_papers.train.source import open_task, source

if TYPE_CHECKING:
    from normkit_papers.studies.ray_workers import RayWorkers

    Engine = Workers | RayWorkers


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """Runs of a study that are left to train.

    Attributes:
        todo: Runs by folder, in the order of training.
        finished: Number of runs that are finished already.
        missing: A line for each data set that is missing (at scale paper: incomplete), whose runs are left out.
        kinds: Kinds of donors that the study's columns show; a run without these scores is not finished.
    """

    todo: dict[Path, Run]
    finished: int
    missing: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


def plan(study: Study, scale: str, out: Path, *, seeds: int = 1, only: Sequence[str] = ()) -> StudyPlan:
    """List the runs that are left to train, seed by seed: all rows appear early.

    Raises:
        ValueError: If nothing can be run at this scale, all data is missing, or a folder holds a run with other
            settings.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1; got {seeds}")
    cells = unique(expand(study, scale, only))
    printed = [row.label for row in study.rows if row.settings is None and row.label in only]
    if not cells and printed:
        raise ValueError(
            f"{', '.join(printed)} of {study.id}: the paper quotes these figures from others; --only takes rows that "
            "can be run"
        )
    if study.measured and scale in study.scales:
        return StudyPlan({}, 0)
    if not cells:
        available = ", ".join(study.scales) or "none"
        raise ValueError(f"{study.id} has no runs at scale {scale} here; scales with runs: {available}")
    runs = dict(seeded(cell, out, seed) for seed in range(seeds) for cell in cells)
    todo = {folder: run for folder, run in runs.items() if not finished(folder, run, study.donors)}
    one_each = {run.data: run for run in todo.values()}
    missing = {data: reason for data, run in one_each.items() if (reason := _missing(run, whole=scale == "paper"))}
    if missing and len(missing) == len({run.data for run in runs.values()}):
        raise ValueError("; ".join(missing.values()))
    kept = {folder: run for folder, run in todo.items() if run.data not in missing}
    return StudyPlan(kept, len(runs) - len(todo), tuple(missing.values()), study.donors)


def _missing(run: Run, whole: bool) -> str:
    """Explain why the data of a run is missing or, with `whole`, incomplete; else empty."""
    try:
        source(run)
    except ValueError as error:
        return str(error)
    if whole and run.data in CORPORA and (part := locate(run.data).partial):
        return (
            f"the corpus {run.data} is here in part alone ({part}), and scale paper is the original setting; "
            f"get the rest from {CORPORA[run.data].origin}, or take another scale"
        )
    return ""


def finished(folder: Path, run: Run, kinds: Sequence[str] = ()) -> bool:
    """Check whether a folder holds this run's result: all scores, or a divergence.

    Raises:
        ValueError: If the result is of another run.
    """
    if not (folder / results.FILE).is_file():
        return False
    result = results.read(folder)
    check(folder, result["run"], run)
    return not result["status"].startswith("interrupted") and not _lacking(result, kinds)


def _lacking(result: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    """Kinds of donors that a result has no scores of; none if its norms have no statistics."""
    return [kind for kind in kinds if kind not in result["scores"]] if "calibrated" in result["scores"] else []


def engine(plan: StudyPlan, processes: int, ray: str | None, board: Board) -> "Engine":
    """Create the engine for a plan: processes on this machine, or Ray at an address.

    Raises:
        ValueError: If the plan needs a GPU and this machine has none.
    """
    if ray is not None:
        from normkit_papers.studies.ray_workers import RayWorkers

        return RayWorkers(ray)
    if any(run.device == "cuda" for run in plan.todo.values()):
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "this scale needs a GPU, and none is here; --scale pocket does not, --ray ADDRESS may have"
            )
    return Workers(processes, board.update)


def run_study(
    study: Study, scale: str, out: Path, plan: StudyPlan, engine: "Engine", board: Board, command: str = ""
) -> tuple[Table, bool]:
    """Train the runs of a plan; after each run, write the table's files again.

    A run that raises leaves failed.txt and is tried again next time; one that another process trains is left to it.

    Returns:
        The table of all finished runs, and whether Ctrl-C interrupted the study.
    """
    folders = {run.name: folder for folder, run in plan.todo.items()}

    def collect_ended() -> None:
        for title, outcome in engine.ended():
            failure = folders[title] / FAILURE
            if isinstance(outcome, Locked):  # by another command for the same study
                status = f"left out: {outcome}"
            elif isinstance(outcome, BaseException):
                status = f"failed: {' '.join(str(outcome).split()) or type(outcome).__name__}"
                write_whole(failure, f"{status[:300]}\n".encode())
            else:
                status = outcome["status"]
                failure.unlink(missing_ok=True)
            board.end(title, status)
            write(collect(study, scale, out), out)

    for folder, run in plan.todo.items():
        engine.submit(run.name, study_job, run, folder, command, plan.kinds)
    interrupted = False
    try:
        collect_ended()
    except KeyboardInterrupt:
        interrupted = True
        board.print("stopping; finished runs are kept, the others resume next time (Ctrl-C again: at once)")
        engine.stop()
        collect_ended()
    if not interrupted and any(column.metric.startswith("cka") for column in study.columns):
        board.print("comparing the layers of the models")
        add_similarity(study, scale, out)
    table = collect(study, scale, out)
    write(table, out)
    return table, interrupted


def study_job(title: str, run: Run, folder: Path, command: str, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Train or resume a run in a worker, unless it is trained; add scores by donors."""
    if not finished(folder, run):
        on_devices(run.devices, train_job, title, run, folder, command, True)
    result = results.read(folder)
    if not result["status"].startswith("interrupted"):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if lacking := _lacking(result, kinds):
        task = open_task(load(folder))
        result["scores"] |= {kind: task.score_donors(kind) for kind in lacking}
        results.write(folder, result)
    return result
