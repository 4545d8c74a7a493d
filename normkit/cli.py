"""The door: `normkit COMMAND ...`. Reads arguments, prints, and turns errors into one line and exit status 2."""

import contextlib
import dataclasses
import difflib
import io
import os
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import normkit
from normkit.norms import NORMS, StatNorm, make, options

EXTRA = "pip install 'normkit[demo]'"
BAD_INPUT, INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if (error.name or "normkit").split(".")[0] == "normkit":
            return _complain(str(error))
        return _complain(f"this needs the package {error.name}, which is not installed; {EXTRA}")
    except (ValueError, TypeError, OSError) as error:
        return _complain(str(error) or type(error).__name__)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _write(_overview())
        return 0 if arguments else BAD_INPUT
    if arguments[0] in ("-V", "--version"):
        _write(f"normkit {normkit.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no command {name!r}{hint}; there are {', '.join(COMMANDS)}")
    return COMMANDS[name](rest) or 0


def _overview() -> str:
    lines = [f"normkit {normkit.__version__}: swap, train, watch and fold away the norms of any Transformer", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  normkit {name:<10} {str(command.__doc__).splitlines()[0]}")
    return "\n".join([*lines, "", "normkit COMMAND --help says more."])


# -- commands: each parses its own arguments --------------------------------------------------------------------------


def demo(arguments: list[str]) -> int:
    """Train a Transformer with each of several norms, compare them, fold one; a few minutes on two CPU cores."""
    from normkit.studies.demo import COMPARED, STEPS

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

    given = _parse(parse, arguments, "demo")
    minutes, processes = given.pop("minutes"), given.pop("processes")
    if given["steps"] is not None and minutes is not None:
        raise ValueError("give --steps or --minutes, not both")
    if processes < 1:
        raise ValueError(f"processes must be at least 1; got {processes}")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"minutes must be above 0; got {minutes:g}")
    steps = STEPS if given["steps"] is None else given["steps"]
    return _demo({**given, "steps": steps}, minutes, processes)


def list_(arguments: list[str]) -> int:
    """All norms with their options, recipes, and sources of data."""

    def parse() -> None:
        """Show all norms with their options and defaults, the recipes of `normkit train`, and the sources of data."""

    if arguments:  # where there are none, torch is all that this command needs
        _parse(parse, arguments, "list")
    from normkit.data.embedded import SOURCES
    from normkit.studies.recipes import RECIPES

    lines = ["Norms: a spec is a name, or a name with options as in 'un(window=8)'", ""]
    everywhere = options("layer")
    for name, kind in NORMS.items():
        kept = "folds away at inference" if make(name, 16).offline else "stays at inference"
        what = f"statistics of batches, {kept}" if issubclass(kind, StatNorm) else "each token by itself"
        own = ", ".join(
            f"{key}={value!r}" for key, value in options(name).items() if (key, value) not in everywhere.items()
        )
        lines.append(f"  {name:<8} {kind.__name__}: {what}")
        lines += textwrap.wrap(own, 110, initial_indent=" " * 11, subsequent_indent=" " * 11)
    lines.append(f"  all of them: {', '.join(f'{key}={value!r}' for key, value in everywhere.items())}")
    lines += ["", "Recipes (normkit train RECIPE)", ""]
    lines += [f"  {name:<13} {str(recipe.__doc__).splitlines()[0]}" for name, recipe in RECIPES.items()]
    lines += ["", "Sources of data, none needs a download", ""]
    lines += [f"  {name:<13} {str(source.__doc__).splitlines()[0]}" for name, source in SOURCES.items()]
    _write("\n".join(lines))
    return 0


def train(arguments: list[str]) -> int:
    """Train a recipe; every field of a run is a flag."""
    from normkit.studies.recipes import RECIPES
    from normkit.train.config import Run, pick

    if not arguments or arguments[0].startswith("-"):
        lines = ["usage: normkit train RECIPE [--steps N] [--model.norm SPEC] [--FIELD VALUE ...]", ""]
        lines += [f"  {name:<13} {str(recipe.__doc__).splitlines()[0]}" for name, recipe in RECIPES.items()]
        _write("\n".join([*lines, "", "normkit train RECIPE --help shows all flags and what they are set to."]))
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

    given = _parse(Given, arguments[1:], f"train {arguments[0]}", default=Given(recipe))
    return _train(given.run, given.out or Path("runs") / given.run.name, given.resume, _typed("train", *arguments))


def pronounce(arguments: list[str]) -> int:
    """Pronounce words with a model of the demo."""
    from tyro.conf import Positional

    def parse(words: Positional[tuple[str, ...]], run: Path | None = None) -> dict[str, Any]:
        """Pronounce words with a trained model, one a line.

        Args:
            words: Words to pronounce, letters and apostrophes.
            run: Folder of the run to use; the best one of runs/demo unless said otherwise.
        """
        return locals()

    given = _parse(parse, arguments, "pronounce")
    if not given["words"]:
        raise ValueError("no word given; try `normkit pronounce transformer`")
    from normkit.studies.use import best, pronounce

    folder = given["run"] or best(Path("runs/demo"))
    if given["run"] is None:
        sys.stderr.write(f"using {folder}\n")
    width = max(map(len, given["words"]))
    for word, sounds in zip(given["words"], pronounce(folder, given["words"]), strict=True):
        _write(f"{word:<{width}}  {' '.join(sounds)}")
    return 0


def translate(arguments: list[str]) -> int:
    """Translate lines of standard input with the model of a run."""
    from tyro.conf import Positional

    def parse(run: Positional[Path]) -> Path:
        """Translate lines of standard input with a trained model, line by line: for g2p, a word a line.

        Args:
            run: Folder of the run.
        """
        return run

    folder = _parse(parse, arguments, "translate")
    from normkit.studies.use import translate_lines

    for line in translate_lines(folder, sys.stdin):
        _write(line)
        sys.stdout.flush()
    return 0


def fold(arguments: list[str]) -> int:
    """Fold the norms of a run's model away, and prove that nothing changed."""
    from tyro.conf import Positional

    def parse(run: Positional[Path], out: Path) -> tuple[Path, Path]:
        """Fold the norms of a trained model into the layers beside them, and prove in float64 that nothing changed.

        Args:
            run: Folder of the run.
            out: Folder for the folded model, which `normkit pronounce --run` and `translate` take like any run.
        """
        return run, out

    folder, out = _parse(parse, arguments, "fold")
    from normkit.train.folded import fold_run
    from normkit.train.run import load, save

    if out.resolve() == folder.resolve():
        raise ValueError(f"--out {out} is the run itself, which is kept; name another folder")
    folded, report = fold_run(load(folder))
    save(out, folded)
    _write(f"{report}\nsaved to {out}")
    return 0


def audit(arguments: list[str]) -> int:
    """Say for each norm of a run's model what folding can make of it."""
    from tyro.conf import Positional

    def parse(run: Positional[Path]) -> Path:
        """Say for each norm of a trained model who reads it, and what folding can make of it. Nothing is changed.

        Args:
            run: Folder of the run.
        """
        return run

    folder = _parse(parse, arguments, "audit")
    from normkit.train.folded import audit_run
    from normkit.train.run import load

    _write(str(audit_run(load(folder))))
    return 0


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

    given = _parse(parse, arguments, "report")
    if not given["paths"]:
        raise ValueError("no results given; try `normkit report runs/demo`")
    return _report(given["paths"], given["out"], _typed("report", *arguments))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "list": list_,
    "train": train,
    "pronounce": pronounce,
    "translate": translate,
    "fold": fold,
    "audit": audit,
    "report": report,
}


# -- what the commands are made of ------------------------------------------------------------------------------------


def _demo(settings: dict[str, Any], minutes: float | None, processes: int) -> int:
    """Train, compare, show; what is finished is shown also when it is stopped early."""
    from rich.console import Console

    from normkit.studies.demo import FINISH, compare, entries, steps_for
    from normkit.studies.progress import Board

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
    command = _typed("demo", *choices)
    with Board(console, [*titles, FINISH], settings["steps"]) as board:
        outcome = compare(plan, board, command, processes)
    if outcome.found:
        _show(console, outcome.found, settings["out"], command)
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    for title, why in outcome.failed.items():
        _complain(f"{title} {why}")
    return INTERRUPTED if outcome.interrupted else 1 if outcome.failed else 0


def _train(run: Any, folder: Path, resume: bool, command: str) -> int:
    """Train one run; Ctrl-C ends it at the next step that is looked at, with a checkpoint where it keeps some."""
    from rich.console import Console

    from normkit.studies.progress import Board
    from normkit.train.run import train as train_run

    console, asked = Console(), threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: _interrupt_once(asked))
    try:
        with Board(console, [run.name], run.steps) as board:

            def on_progress(progress: Any) -> bool:
                board.tell(run.name, progress)
                return asked.is_set()

            result = train_run(run, folder, resume, on_progress, command)
            board.end(run.name, result["status"])
    finally:
        signal.signal(signal.SIGINT, before)
    _show(console, {folder: result}, folder, command)
    return INTERRUPTED if asked.is_set() else 0


def _interrupt_once(asked: threading.Event) -> None:
    if asked.is_set():
        raise KeyboardInterrupt
    asked.set()


def _report(paths: tuple[Path, ...], out: Path | None, command: str) -> int:
    """Show what is in result files."""
    from rich.console import Console

    from normkit.report import results

    found = results.find(paths)
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    _show(Console(), found, out or first, command)
    return 0


def _show(console: Any, found: dict[Path, dict[str, Any]], out: Path, command: str) -> None:
    """Print the table and what is seen in it; write them, the pictures and the page to a folder."""
    from rich.table import Table

    from normkit.report import page, plot, settings, summary

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
        _write(summary.text(found))
    for draw in (plot.curves, plot.statistics):
        with contextlib.suppress(ValueError):  # nothing to draw, as the statistics of norms that have none
            for ending in ("png", "svg"):
                draw(found, out / f"{draw.__name__}.{ending}")
    written = page.write(found, out / "report.html", title=out.name, command=command)
    console.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)


def _parse(target: Any, arguments: list[str], name: str, **default: Any) -> Any:
    """Arguments as a function's parameters or a dataclass's fields; what is wrong with them on one line."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(target, args=arguments, prog=f"normkit {name}", **default)
    except SystemExit as ended:
        if not ended.code:
            raise
        raise ValueError(f"{_one_line(box.getvalue())}; `normkit {name} --help` shows what there is") from None


def _one_line(box: str) -> str:
    """The first sentence in a box of several lines, and the option that it proposes.

    >>> _one_line("╭─ Oh ─╮\\n│ Unknown: --sed │\\n│ ─── │\\n│ Perhaps you meant: │\\n│ --seed INT │\\n╰──╯")
    "Unknown: --sed (did you mean '--seed'?)"
    """
    lines = [line.strip("│ ") for line in box.splitlines() if line.strip() and line[0] not in "╭╰"]
    sections: list[list[str]] = [[]]
    for line in lines:
        if line.strip("─-"):
            sections[-1].append(line)
        else:
            sections.append([])
    if "╭" not in box:  # without a frame the title is a line like any other
        sections = sections[1:]
    message = " ".join(sections[0] if sections else lines).rstrip(".")
    near = [line.split()[0].rstrip(",") for part in sections for line in part if line.startswith("--")]
    return f"{message} (did you mean {near[0]!r}?)" if near and "Perhaps you meant:" in lines else message


def _typed(*words: str) -> str:
    """A command as a person would type it."""
    return shlex.join(["normkit", *words])


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(text: str, status: int = BAD_INPUT) -> int:
    sys.stderr.write(f"normkit: {' '.join(text.split())}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
