"""Commands that train: `demo` and `train`."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

from normkit.text import align
from normkit_papers.cli.line import (
    BAD_INPUT,
    INTERRUPTED,
    check_seeds,
    check_writable,
    complain,
    parse_arguments,
    progress_console,
    typed,
    write,
)
from normkit_papers.cli.listing import summary
from normkit_papers.cli.reporting import show


def demo(arguments: list[str]) -> int:
    """Train a Transformer with each of several norms, compare them, fold one.

    A few minutes on two CPU cores.
    """
    from normkit_papers.studies.demo import COMPARED, STEPS

    def parse(
        norms: tuple[str, ...] = COMPARED,
        steps: int | None = None,
        minutes: float | None = None,
        bucketing: bool = True,
        seed: int = 0,
        out: Path = Path("runs/demo"),
        processes: int = 2,
    ) -> dict[str, Any]:
        """Train a Transformer with each of several norms on the CMU Pronouncing Dictionary.

        Compare them, fold one.

        Args:
            norms: Norm specs to compare, e.g. layer 'un(window=8)' rms; `normkit list` lists all.
            steps: Steps of each norm; 3600 by default.
            minutes: Choose the steps so that the demo takes about this many minutes here.
            bucketing: Batches of words of similar length, as is usual; --no-bucketing for any lengths.
            seed: Seed of weights and data order, the same for all norms.
            out: Folder for models, table, figures and report.html.
            processes: Norms trained at the same time, one thread each.
        """
        return locals()

    given = parse_arguments(parse, arguments, "demo")
    minutes, processes = given.pop("minutes"), given.pop("processes")
    if given["steps"] is not None and minutes is not None:
        raise ValueError("give --steps or --minutes, not both")
    if processes < 1:
        raise ValueError(f"processes must be at least 1; got {processes}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be above 0 and finite; got {minutes:g}")
    check_writable(given["out"])
    steps = STEPS if given["steps"] is None else given["steps"]
    return _demo({**given, "steps": steps}, minutes, processes)


def _demo(settings: dict[str, Any], minutes: float | None, processes: int) -> int:
    """Train, compare, show; after an interrupt, show the finished norms."""
    from normkit_papers.studies.demo import FINISH, compare, entries, steps_for
    from normkit_papers.studies.progress import Board

    console, started = progress_console(), time.monotonic()
    plan = entries(**settings)
    titles = [entry.title for entry in plan]
    if minutes is not None:
        with Board(console, titles, 1) as board:
            settings["steps"] = steps_for(minutes, plan, board, processes)
        console.print(f"{settings['steps']:,} steps fit into {minutes:g} minutes")
        plan = entries(**settings)
    choices = ["--steps", str(settings["steps"]), "--seed", str(settings["seed"]), "--out", str(settings["out"])]
    choices += ["--norms", *settings["norms"], *([] if settings["bucketing"] else ["--no-bucketing"])]
    command = typed("demo", *choices)
    with Board(console, [*titles, FINISH], settings["steps"]) as board:
        outcome = compare(plan, board, command, processes)
    if outcome.found:
        show(outcome.found, settings["out"], command)
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    for title, why in outcome.failed.items():
        complain(f"{title} {why}")
    return INTERRUPTED if outcome.interrupted else 1 if outcome.failed else 0


def train(arguments: list[str]) -> int:
    """Train a recipe; every setting of a run is a flag."""
    from normkit.names import pick
    from normkit_papers.studies.catalogue import RECIPES
    from normkit_papers.study import warm
    from normkit_papers.train.config import Run

    if not arguments or arguments[0].startswith("-"):
        lines = ["usage: normkit train RECIPE [--steps N] [--model.norm SPEC] [--SETTING VALUE ...]", ""]
        lines.append(indent(align([(name, summary(recipe)) for name, recipe in RECIPES.items()]), "  "))
        write("\n".join([*lines, "", "normkit train RECIPE --help lists all flags with their values."]))
        return 0 if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    recipe = pick(RECIPES, arguments[0], "recipe")()
    import tyro

    @dataclasses.dataclass
    class Given:
        run: Annotated[Run, tyro.conf.arg(name="")]
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
        """Folder of the run; runs/NAME by default."""
        resume: bool = False
        """Continue from the last checkpoint in that folder."""
        seeds: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
        """Train this many seeds, from --seed on, each in a folder seed-N."""

    given = parse_arguments(Given, arguments[1:], f"train {arguments[0]}", default=Given(recipe))
    run, folder = warm(given.run, automatic=True), given.out or Path("runs") / given.run.name
    check_seeds(1 if given.seeds is None else given.seeds)
    check_writable(folder)
    runs = {folder: run}
    if given.seeds is not None:
        numbers = range(run.seed, run.seed + given.seeds)
        runs = {folder / f"seed-{n}": dataclasses.replace(run, seed=n, name=f"{run.name}/seed-{n}") for n in numbers}
    return _train(runs, folder, given.resume, typed("train", *arguments))


def _train(runs: dict[Path, Any], out: Path, resume: bool, command: str) -> int:
    """Train runs one after the other; an interrupt ends them."""
    from normkit_papers.report import results
    from normkit_papers.studies.progress import Board
    from normkit_papers.train.folder import check_resumable, checkpoints
    from normkit_papers.train.run import train as train_run

    console, found = progress_console(), dict[Path, Any]()
    first = next(iter(runs.values()))
    tenth = first.steps // 10
    advice = (
        f"the learning rate's warm-up of {first.warmup:,} steps does not end within {first.steps:,}; "
        f"--warmup {tenth} {'would be a tenth' if tenth else 'trains without one'}"
    )
    notes = [advice] if first.warmup >= first.steps > 0 else []
    if resume:
        for folder, run in runs.items():
            check_resumable(folder, run)
        found = {folder: result for folder in runs if (result := results.ended(folder))}
        if not found and not any(map(checkpoints, runs)):
            complain(f"{out} has no checkpoint to resume from: training starts at the beginning")
    with interruptible() as signals, Board(console, [run.name for run in runs.values()], first.steps) as board:
        for folder, run in runs.items():

            def on_progress(progress: Any, name: str = run.name) -> bool:
                if notes and progress.stage == "training":  # after all checks
                    complain(notes.pop())
                board.update(name, progress)
                return bool(signals)

            if folder not in found and not signals:
                try:
                    found[folder] = train_run(run, folder, resume, on_progress, command)
                except KeyboardInterrupt:
                    if len(signals) != 1:
                        raise  # the second Ctrl-C
            if folder in found:
                board.end(run.name, found[folder]["status"])
    found = {folder: found[folder] for folder in runs if folder in found}
    if found:
        show(found, out, command)
    if signals:
        complain("interrupted; the same command with --resume continues")
    diverged = [f"{folder} {result['status']}" for folder, result in found.items() if "diverged" in result["status"]]
    for line in diverged:
        complain(f"{line}; a lower --lr or a longer --warmup may help, and `normkit doctor` shows what failed first")
    return 128 + signals[0] if signals else 1 if diverged else 0


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the returned list; a second one raises KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
