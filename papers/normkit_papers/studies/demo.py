"""The demo: train one model with each of several norms alike, then fold one."""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from normkit.bench import ROUNDS
from normkit.norms import NORMS, StatNorm, parse
from normkit_papers.recipes import g2p_cmudict
from normkit_papers.report import results
from normkit_papers.studies.evaluate import finish_job
from normkit_papers.studies.progress import Board
from normkit_papers.studies.workers import Workers, send, train_job
from normkit_papers.study import slug, warmed
from normkit_papers.train.config import Run
from normkit_papers.train.progress import Progress

COMPARED = ("layer", "scale", "un", "power(groups=0)", "pnv", "batch")
STEPS = 3600
FINISH = "folding and timing"

# --minutes reserves time for these, in steps of the slowest worker
SCORING = 700  # after the training of each norm
FINISHING = 1500  # before and after all of them
LEAST = 200
SPEED_SAMPLES = 5
SPARE = 0.05  # share of the minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One norm of the demo: its title in the table, its run, and the run's folder."""

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
    """Make the runs of the demo, one per norm spec.

    `scale` comes with FixNorm. Statistics end their warm-up by drift, unless the spec sets `warmup`.

    Args:
        norms: Norm specs.
        steps: Steps of each run.
        seed: Seed of weights and data order.
        bucketing: Batches of words of similar length.
        out: Folder of the runs' folders.
        test_items: Words to score.

    Raises:
        ValueError: If a spec is unknown or given twice, or there is none.

    >>> [entry.run.model.norm for entry in entries(("layer", "un"), steps=1000)]
    ['layer', 'un']
    """
    found = []
    for spec in norms:
        warmup = max(1, steps // 10)
        recipe = g2p_cmudict()
        fixnorm = parse(spec)[0] == "scale"  # FixNorm normalizes the embedding, to which the output is tied then
        model = dataclasses.replace(
            recipe.model, norm=warmed(spec, warmup, automatic=True), fixnorm=fixnorm, tie=fixnorm
        )
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
        if out / slug(spec) in [entry.folder for entry in found]:  # also 'un' and 'un()'
            raise ValueError(f"{spec!r} is given twice; give each norm once")
        found.append(Entry(title=title, run=run, folder=out / slug(spec)))
    if not found:
        raise ValueError(f"no norm given; the demo compares {', '.join(COMPARED)}")
    return found


@dataclasses.dataclass
class DemoResult:
    """Result of a demo.

    Attributes:
        found: Results by folder, in the order of the plan.
        failed: Error messages by title.
        interrupted: Ctrl-C ended it.
    """

    found: dict[Path, dict[str, Any]]
    failed: dict[str, str]
    interrupted: bool


def compare(plan: list[Entry], board: Board, command: str, processes: int = 2, rounds: int = ROUNDS) -> DemoResult:
    """Train all norms in parallel, then fold and time them; Ctrl-C keeps finished ones."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    interrupted = False
    with Workers(processes, board.update) as workers:

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
                offline = [title for title in scored if "donors" in found[title]["scores"]]
                to_fold = "un" if "un" in offline else next(iter(offline), None)
                workers.submit(FINISH, finish_job, scored, to_fold, "layer" if "layer" in scored else None, rounds)
                collect()
                found |= {title: results.read(folder) for title, folder in scored.items()}
        except KeyboardInterrupt:
            interrupted = True
            board.print("stopping; what is finished is kept (Ctrl-C again to stop at once)")
            workers.stop()
            collect()
    by_folder = {entry.folder: found[entry.title] for entry in plan if entry.title in found}
    return DemoResult(by_folder, failed, interrupted)


def _ending(result: Any) -> str:
    if result is None:
        return "done"
    running = result["scores"].get("running")
    return f"{result['status']}, PER {running['per']:.1f}" if running else result["status"]


def _cost(entry: Entry) -> bool:
    """Sort key: norms with batch statistics take longest, so they start first."""
    return issubclass(NORMS[parse(entry.run.model.norm)[0]], StatNorm)


def steps_for(minutes: float, plan: list[Entry], board: Board, processes: int = 2) -> int:
    """Estimate the steps that fit into some minutes, by training each norm briefly.

    Raises:
        ValueError: If the minutes do not suffice.
    """
    costs = {}
    with Workers(processes, board.update) as workers, tempfile.TemporaryDirectory() as folder:
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
    """Measure the seconds per step of a run, in a worker."""
    from normkit_papers.train.run import train

    samples: list[tuple[float, int]] = []

    def on_progress(progress: Progress) -> bool:
        samples.append((time.perf_counter(), progress.step))
        stop = send(title, progress._replace(stage="measuring speed"))
        return stop or len(samples) == SPEED_SAMPLES

    train(run, folder, on_progress=on_progress)
    (start, first_step), (end, last_step) = samples[1], samples[-1]
    return (end - start) / (last_step - first_step)
