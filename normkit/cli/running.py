"""Commands that train: `demo` and `train`."""

import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

from normkit.cli.line import BAD_INPUT, INTERRUPTED, complain, parse_arguments, typed, write
from normkit.cli.reporting import show


def demo(arguments: list[str]) -> int:
    """Train a Transformer with each of several norms, compare them, fold one; a few minutes on two CPU cores."""
    from normkit.lab.studies.demo import COMPARED, STEPS

    def parse(
        norms: tuple[str, ...] = COMPARED,
        steps: int | None = None,
        minutes: float | None = None,
        bucketing: bool = True,
        seed: int = 0,
        out: Path = Path("runs/demo"),
        processes: int = 2,
    ) -> dict[str, Any]:
        """Train a Transformer with each of several norms on the CMU Pronouncing Dictionary, compare them, fold one.

        Args:
            norms: Norm specs to compare, such as layer 'un(window=8)' rms; `normkit list` knows all.
            steps: Steps of each norm, the same for all; 3600 unless said otherwise.
            minutes: Choose the steps such that all of it takes about so long here.
            bucketing: Batches of words of about one length, as is usual; --no-bucketing takes any lengths.
            seed: Seed of weights and data order, the same for all norms.
            out: Folder for models, table, pictures and report.html.
            processes: Norms trained at the same time, one thread each.
        """
        return locals()

    given = parse_arguments(parse, arguments, "demo")
    minutes, processes = given.pop("minutes"), given.pop("processes")
    if given["steps"] is not None and minutes is not None:
        raise ValueError("give --steps or --minutes, not both")
    if processes < 1:
        raise ValueError(f"processes must be at least 1; got {processes}")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"minutes must be above 0; got {minutes:g}")
    steps = STEPS if given["steps"] is None else given["steps"]
    return _demo({**given, "steps": steps}, minutes, processes)


def _demo(settings: dict[str, Any], minutes: float | None, processes: int) -> int:
    """Train, compare, show; what is finished is shown also when it is stopped early."""
    from rich.console import Console

    from normkit.lab.studies.demo import FINISH, compare, entries, steps_for
    from normkit.lab.studies.progress import Board

    console, started = Console(), time.monotonic()
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
        show(console, outcome.found, settings["out"], command)
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    for title, why in outcome.failed.items():
        complain(f"{title} {why}")
    return INTERRUPTED if outcome.interrupted else 1 if outcome.failed else 0


def train(arguments: list[str]) -> int:
    """Train a recipe; every field of a run is a flag."""
    from normkit.lab.studies.catalogue import RECIPES
    from normkit.lab.studies.study import warm
    from normkit.lab.train.config import Run
    from normkit.names import pick

    if not arguments or arguments[0].startswith("-"):
        lines = ["usage: normkit train RECIPE [--steps N] [--model.norm SPEC] [--FIELD VALUE ...]", ""]
        lines += [f"  {name:<13} {str(recipe.__doc__).splitlines()[0]}" for name, recipe in RECIPES.items()]
        write("\n".join([*lines, "", "normkit train RECIPE --help shows all flags and what they are set to."]))
        return 0 if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    recipe = pick(RECIPES, arguments[0], "recipe")()
    import tyro

    @dataclasses.dataclass
    class Given:
        run: Annotated[Run, tyro.conf.arg(name="")]
        out: Path | None = None
        """Folder of the run; runs/NAME unless said otherwise."""
        resume: bool = False
        """Go on from the last checkpoint in that folder."""

    given = parse_arguments(Given, arguments[1:], f"train {arguments[0]}", default=Given(recipe))
    return _train(warm(given.run), given.out or Path("runs") / given.run.name, given.resume, typed("train", *arguments))


def _train(run: Any, folder: Path, resume: bool, command: str) -> int:
    """Train one run; Ctrl-C ends it at the next step that is looked at, with a checkpoint where it keeps some."""
    from rich.console import Console

    from normkit.lab.studies.progress import Board
    from normkit.lab.train.run import train as train_run

    console, asked = Console(), threading.Event()
    if run.warmup >= run.steps > 0:
        complain(
            f"the warm-up of {run.warmup:,} steps does not end within {run.steps:,}, for learning rate and statistics; "
            f"--warmup {max(1, run.steps // 10)} would be a tenth"
        )
    before = signal.signal(signal.SIGINT, lambda *_: _interrupt_once(asked))
    try:
        with Board(console, [run.name], run.steps) as board:

            def on_progress(progress: Any) -> bool:
                board.update(run.name, progress)
                return asked.is_set()

            result = train_run(run, folder, resume, on_progress, command)
            board.end(run.name, result["status"])
    finally:
        signal.signal(signal.SIGINT, before)
    show(console, {folder: result}, folder, command)
    return INTERRUPTED if asked.is_set() else 0


def _interrupt_once(asked: threading.Event) -> None:
    if asked.is_set():
        raise KeyboardInterrupt
    asked.set()
