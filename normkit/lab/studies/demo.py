"""The main job: one task, several norms, the same seed, data order and budget; then what folding makes of one."""

import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from normkit.lab.report import results
from normkit.lab.studies.evaluate import finish_job
from normkit.lab.studies.progress import Board
from normkit.lab.studies.recipes import g2p_cmudict
from normkit.lab.studies.study import warmed
from normkit.lab.studies.workers import Workers, tell, train_job
from normkit.lab.train.config import Run
from normkit.lab.train.progress import Progress
from normkit.norms import NORMS, StatNorm, parse

COMPARED = ("layer", "scale", "un", "power(groups=0)", "pnv", "batch")
STEPS = 3600
FINISH = "folding and timing"

# What --minutes sets aside, in steps of the slowest worker
SCORING = 700  # after the training of each norm
FINISHING = 1500  # after all of them, and before
LEAST = 200
LOOKS = 5
SPARE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One norm of the demo: its title in the table, its run, and the folder that the run goes to."""

    title: str
    run: Run
    folder: Path


def entries(
    norms: tuple[str, ...] = COMPARED,
    *,
    steps: int = STEPS,
    seed: int = 0,
    bucketing: bool = True,
    out: Path = Path("runs/demo"),
    test_items: int = 2000,
) -> list[Entry]:
    """The runs of the demo, one a norm spec; ValueError for a spec that there is not, or one given twice.

    `scale` comes with FixNorm. Statistics that have a warm-up of their own warm up as long as the learning rate does,
    unless the spec says otherwise.

    >>> [entry.run.model.norm for entry in entries(("layer", "un"), steps=1000)]
    ['layer', 'un(warmup=100)']
    """
    found = []
    for spec in norms:
        warmup = max(1, steps // 10)
        norm = warmed(spec, warmup)
        recipe = g2p_cmudict()
        fixed = parse(spec)[0] == "scale"  # FixNorm is of the input and of the output that is tied to it
        model = dataclasses.replace(recipe.model, norm=norm, fixnorm=fixed, tie=fixed)
        run = dataclasses.replace(
            recipe,
            name=f"demo {spec}",
            model=model,
            steps=steps,
            warmup=warmup,
            valid_every=max(1, steps // 10),
            checkpoint_every=0,
            record_every=max(1, steps // 200),
            bucketing=bucketing,
            seed=seed,
            test_items=test_items,
            device="cpu",
        )
        title = f"{spec} + FixNorm" if model.fixnorm else spec
        if title in [entry.title for entry in found]:
            raise ValueError(f"{spec!r} is given twice; give each norm once")
        found.append(Entry(title=title, run=run, folder=out / slug(spec)))
    if not found:
        raise ValueError(f"no norm given; the demo compares {', '.join(COMPARED)}")
    return found


def slug(spec: str) -> str:
    """A spec as the name of a folder.

    >>> slug("power(groups=0)")
    'power-groups=0'
    """
    return re.sub(r"[^\w.=]+", "-", spec).strip("-")


@dataclasses.dataclass
class Outcome:
    """What came of a demo: results by folder, in the order of the plan, what failed by title, and how it ended."""

    found: dict[Path, dict[str, Any]]
    failed: dict[str, str]
    interrupted: bool


def compare(plan: list[Entry], board: Board, command: str, processes: int = 2) -> Outcome:
    """Train all norms of a plan, some side by side, then fold and time them. Ctrl-C ends it and keeps what is there."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    interrupted = False
    with Workers(processes, board.tell) as workers:

        def collect() -> None:
            for title, result in workers.ended():
                if isinstance(result, BaseException):
                    failed[title] = f"failed: {result}"
                elif title != FINISH:
                    found[title] = result
                board.end(title, failed.get(title) or _ending(result))

        try:
            for entry in sorted(plan, key=_cost, reverse=True):
                workers.submit(entry.title, train_job, entry.run, entry.folder, command)
            collect()
            scored = {entry.title: entry.folder for entry in plan if found.get(entry.title, {}).get("scores")}
            if scored:
                offline = [title for title in scored if "batch" in found[title]["scores"]]
                to_fold = "un" if "un" in offline else next(iter(offline), None)
                workers.submit(FINISH, finish_job, scored, to_fold, "layer" if "layer" in scored else None)
                collect()
                found |= {title: results.read(folder) for title, folder in scored.items()}
        except KeyboardInterrupt:
            interrupted = True
            board.say("stopping; what is finished is kept (Ctrl-C again to stop at once)")
            workers.stop()
            collect()
    by_folder = {entry.folder: found[entry.title] for entry in plan if entry.title in found}
    return Outcome(by_folder, failed, interrupted)


def _ending(result: Any) -> str:
    if result is None:
        return "done"
    running = result["scores"].get("running")
    return f"{result['status']}, PER {running['per']:.1f}" if running else result["status"]


def _cost(entry: Entry) -> bool:
    """Norms with statistics of batches take longest: they come first."""
    return issubclass(NORMS[parse(entry.run.model.norm)[0]], StatNorm)


def steps_for(minutes: float, plan: list[Entry], board: Board, processes: int = 2) -> int:
    """Steps that fit into so many minutes, by training each norm for a moment, as many at a time as later."""
    costs = {}
    with Workers(processes, board.tell) as workers, tempfile.TemporaryDirectory() as folder:
        for entry in sorted(plan, key=_cost, reverse=True):
            workers.submit(entry.title, measure_job, entry.run, Path(folder) / entry.folder.name)
        for title, seconds in workers.ended():
            if isinstance(seconds, BaseException):
                raise seconds
            costs[title] = seconds
    busy = [0.0] * processes
    for entry in sorted(plan, key=_cost, reverse=True):
        busy[busy.index(min(busy))] += costs[entry.title]
    steps = round(60 * minutes * (1 - SPARE) / max(busy)) - SCORING * len(plan) // processes - FINISHING
    if steps < LEAST:
        needed = (LEAST + SCORING * len(plan) // processes + FINISHING) * max(busy) / 60 / (1 - SPARE)
        raise ValueError(f"--minutes {minutes:g} is too short for {len(plan)} norms here; needs about {needed:.1f}")
    return steps


def measure_job(title: str, run: Run, folder: Path) -> float:
    """A worker's job: seconds that a step of a run takes."""
    from normkit.lab.train.run import train

    seen: list[tuple[float, int]] = []

    def on_progress(progress: Progress) -> bool:
        seen.append((time.perf_counter(), progress.step))
        asked = tell(title, progress._replace(stage="measuring speed"))
        return asked or len(seen) == LOOKS

    train(run, folder, on_progress=on_progress)
    (start, first), (end, last) = seen[1], seen[-1]
    return (end - start) / (last - first)
