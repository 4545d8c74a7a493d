"""The command `papers`: train, run the studies of the papers, and report.

Exit status: 0 if all went well, 1 if a run failed or diverged, 2 for bad input (one line on standard error), 130 after
Ctrl-C, 143 after SIGTERM.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from normkit._util import align, escape, pick, require, truncate
from normkit.cli import import_module

Scale = Literal["pocket", "gpu", "paper"]
BAD_INPUT, INTERRUPTED = 2, 130
WIDTH = 120  # columns of a line of a list


def demo(
    norms: tuple[str, ...] = ("layer", "scale", "un", "batch"),
    steps: int = 1500,
    seed: int = 0,
    out: Path = Path("runs/demo"),
    processes: int = 2,
) -> int:
    """Train one Transformer with each of several norms from spelling to sound, fold one, compare.

    Args:
        norms: Norm specs to compare; `normkit list` lists all.
        steps: Steps of each norm.
        seed: Seed of weights and data order, the same for all norms.
        out: Folder for models and report.html. Finished runs in it are kept.
        processes: Norms trained at the same time, one thread each.
    """
    from normkit_papers import results
    from normkit_papers.studies import demo as made
    from normkit_papers.studies.runner import train_all

    started, runs = time.monotonic(), made.runs(norms, out, steps, seed)
    status = train_all(runs, _typed("demo"), processes)
    scored = [folder for folder in runs if results.exists(folder) and results.read(folder)["scores"]]
    if scored:
        _write("folding and timing")
        made.fold_and_time(scored)
        _show({folder: results.read(folder) for folder in scored}, out)
    _write(f"{time.monotonic() - started:.0f} s in all")
    return _failed(status)


def train(arguments: list[str]) -> int:
    """Train a recipe; every setting is a flag. Without a recipe, list all that there are."""
    from normkit_papers.recipes import RECIPES
    from normkit_papers.studies.catalogue import recipe_rows
    from normkit_papers.study import warm

    if not arguments or arguments[0].startswith("-"):
        _write("usage: papers train RECIPE [--steps N] [--model.norm SPEC] [--import MODULE] [--SETTING VALUE ...]\n")
        return _list(recipe_rows())
    recipe = pick(RECIPES, arguments[0], "recipe")
    default = recipe()

    @dataclasses.dataclass
    class Given:
        run: Annotated[type(default), tyro.conf.arg(name="")]  # type: ignore[valid-type]
        out: Path | None = None
        """Folder of the run; runs/NAME by default."""
        resume: bool = False
        """Continue from the last checkpoint in that folder."""
        seeds: int = 1
        """Train this many seeds, from --seed on; of several, each in a folder seed-N."""

    given = tyro.cli(Given, args=arguments[1:], prog=f"papers train {arguments[0]}", default=Given(default),
                     description=recipe.description)  # fmt: skip
    run, folder = warm(given.run, automatic=True), given.out or Path("runs") / given.run.name
    require(given.seeds > 0, "--seeds", given.seeds, "at least 1")
    runs = {folder: run}
    if given.seeds > 1:
        numbers = range(run.seed, run.seed + given.seeds)
        runs = {folder / f"seed-{n}": dataclasses.replace(run, seed=n, name=f"{run.name}/seed-{n}") for n in numbers}
    return _train(runs, folder, given.resume)


def _train(runs: Mapping[Path, Any], out: Path, resume: bool) -> int:
    """Train runs one after the other, in this process; an interrupt ends them."""
    from rich.console import Console

    from normkit_papers import results
    from normkit_papers.studies.runner import describe, progress_bars
    from normkit_papers.train.folder import checkpoints
    from normkit_papers.train.run import train as train_run

    found, told = dict[Path, Any](), set[str]()
    with _interruptible() as signals, progress_bars(Console()) as bars:
        for folder, run in runs.items():
            row = bars.add_task(run.name, state="")

            def on_progress(progress: Any, run: Any = run, row: Any = row) -> bool:
                shown = describe(progress)
                bars.update(row, **shown)
                tenth = f"{run.name} {progress.stage} {10 * progress.step // progress.steps}"
                if not bars.console.is_terminal and tenth not in told:  # as into a file
                    told.add(tenth)
                    _write(f"{run.name}: step {progress.step:,} of {progress.steps:,}, {shown['state']}")
                return bool(signals)

            if signals:
                break
            if resume and folder.is_dir() and results.ended(folder) is None and not checkpoints(folder):
                _write(f"{run.name}: {folder} has no checkpoint yet, so it starts again (--checkpoint-every)")
            try:
                found[folder] = train_run(run, folder, resume, on_progress, _typed("train"))
            except KeyboardInterrupt:
                if len(signals) != 1:  # the second Ctrl-C
                    raise
    _show(found, out)
    if signals:
        _complain("interrupted; the same command with --resume continues")
        return 128 + signals[0]
    return _failed({folder: result["status"] for folder, result in found.items()})


@dataclasses.dataclass(frozen=True)
class How:
    """How runs of studies are trained."""

    scale: Scale = "pocket"
    """pocket (minutes of a CPU core a run), gpu (ten minutes of a GPU a run) or paper (the original)."""
    seeds: int | None = None
    """Runs of each cell; by default the study's own number."""
    out: Path = Path("runs/studies")
    """Folder of the runs, of one CSV a study, and of the page."""
    processes: int = 1
    """Runs at the same time on this machine."""
    ray: str | None = None
    """Address of a Ray cluster to train on, or `local`."""


def study(
    name: tyro.conf.Positional[str] = "",
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False,
    show: bool = False,
    only: tuple[str, ...] = (),
    how: Annotated[How, tyro.conf.arg(name="")] = How(),
) -> int:
    """Run a study, a table or figure of a paper, and compare with the printed figures.

    The same command again continues: finished runs are kept, interrupted ones resume. Studies share common runs.

    Args:
        name: Name of the study, such as un.table9.
        list_: List all studies, which scales this machine can run, and missing data with its source.
        show: Show the table from the CSV in --out or, without one, of the kept results; run nothing.
        only: Labels of rows to run, or norms; all by default.
        how: How to train.
    """
    from normkit_papers.studies import rows, table
    from normkit_papers.studies.catalogue import STUDIES, study_rows
    from normkit_papers.study import expand

    if list_ or not name:
        return _list(study_rows())
    chosen = pick(STUDIES, name, "study")
    expand(chosen, how.scale, only)  # checks the names
    if show:
        found, path = rows.known(chosen, how.scale, how.out)
        _write_table(table.build(chosen, how.scale, found))
        nowhere = f"no run at scale {how.scale} yet, neither in {how.out} nor in the kept results"
        _write(f"from {path}" if path else nowhere)
        return 0
    if how.scale not in chosen.scales:
        hint = f"it is measured by `{chosen.script}`" if chosen.script else f"it can run at {', '.join(chosen.scales)}"
        raise ValueError(f"{name} has no runs at scale {how.scale}; {hint}")
    return _run_studies([name], only, how)


def reproduce(only: tuple[str, ...] = (), how: Annotated[How, tyro.conf.arg(name="")] = How(processes=2)) -> int:
    """Run or continue all tables and figures of the three papers, and make the page of results.

    Args:
        only: Studies to run, such as un.table9; all of the papers by default.
        how: How to train.
    """
    from normkit_papers.studies.catalogue import OF_PAPERS, STUDIES

    for name in only:
        pick(STUDIES, name, "study")
    return _run_studies(only or OF_PAPERS, (), how)


def _run_studies(names: Sequence[str], only: Sequence[str], how: How) -> int:
    """Train what is left of some studies, print their tables and write the page."""
    from normkit_papers import results
    from normkit_papers.report import page, verdicts
    from normkit_papers.studies import rows, runner, table
    from normkit_papers.studies.catalogue import STUDIES
    from normkit_papers.study import expand
    from normkit_papers.study import seeds as seeds_of

    for name, count in (("--processes", how.processes), ("--seeds", how.seeds)):
        require(count is None or count > 0, name, count, "at least 1")
    chosen = [STUDIES[name] for name in names]
    plan = runner.plan(chosen, how.scale, how.out, how.seeds, only)
    _write(f"{len(plan.todo)} runs to train, {plan.finished} finished before")
    for data, why in plan.missing.items():
        _complain(f"left out, without {data}: {why}")
    if plan.missing and not plan.todo and not plan.finished:
        return BAD_INPUT
    status = runner.run_studies(chosen, how.scale, how.out, plan, _typed(), processes=how.processes, ray=how.ray)
    title = names[0] if len(names) == 1 else "Tables and figures of the three papers"
    made = page.Page(f"{title}, scale {how.scale}")
    built = {each.id: table.build(each, how.scale, rows.known(each, how.scale, how.out)[0]) for each in chosen}
    verdicts.add(made, built.values())
    for each in chosen:
        folders = [f for cell in expand(each, how.scale) for f in seeds_of(how.out / cell.folder).values()]
        page.add_study(made, built[each.id], list(filter(results.exists, dict.fromkeys(folders))))
        if len(chosen) == 1:
            _write_table(built[each.id])
    _write(f"report: {made.write(how.out / (f'{names[0]}.html' if len(names) == 1 else 'report.html'))}")
    return _failed(status)


def _write_table(made: Any) -> None:
    """Print the table of a study, and whether it agrees with the paper's claim."""
    from normkit_papers.report import verdicts
    from normkit_papers.studies import table

    _write(table.text(made))
    if made.study.rules:
        verdict, rules = verdicts.judge(made)
        _write("\n".join([f"Verdict: {verdict}.", *(f"  {rule}" for rule in rules)]))


def report(
    paths: tyro.conf.Positional[tuple[Path, ...]], figure: str = "", compare: bool = False, out: Path | None = None
) -> int:
    """Make a page of runs or of recorded rows; or draw a figure of the papers; or compare seeds.

    Args:
        paths: Run folders, or folders with runs inside; files of rows by `normkit.record`.
        figure: Draw this figure of the papers from the runs, such as pn.figure2; `list` lists all.
        compare: Print the table of the runs, with intervals over seeds, and make no page.
        out: File of the page; report.html beside the first path, or NAME.html of a figure, by default.
    """
    from normkit_papers import figures, results
    from normkit_papers.report import page, summary

    if figure == "list":
        _write(align([[name, figures.title(name)] for name in figures.FIGURES]))
        return 0
    if figure:
        pick(figures.FIGURES, figure, "figure")
    if not paths:
        raise ValueError("no path is given; try `papers report runs/demo`")
    allowed = "a name that ends in .html; the page has buttons that save a chart as picture"
    require(out is None or out.suffix == ".html", "--out", str(out), allowed)
    for folder in results.unfinished(paths):
        _complain(f"has not ended: {folder}")
    if compare:
        _write(summary.text(results.find(paths)))
        return 0
    if figure:
        drawn, left_out = figures.draw(figure, results.find(paths))
        made = page.Page(f"{figure}: {figures.title(figure)}")
        made.chart(drawn)
        _write(f"figure: {made.write(out or Path(f'{figure}.html'))}")
        if left_out:
            _write(f"not in it, as they lack what it shows: {', '.join(truncate(left_out))}")
        return 0
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    made = page.make(paths, f"Report of {', '.join(path.name or str(path) for path in paths)}")
    _write(f"report: {made.write(out or folder / 'report.html')}")
    return 0


def translate(run: tyro.conf.Positional[Path]) -> int:
    """Translate lines of standard input with the model of a run; for a run of task g2p, a line is a word.

    Args:
        run: Folder of the run.
    """
    from normkit_papers.inference import translate_lines

    for stream in (sys.stdin, sys.stdout):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(encoding="utf8")  # type: ignore[attr-defined]
    for line in translate_lines(run, (line.rstrip("\n") for line in sys.stdin), _complain):
        _write(line)
        sys.stdout.flush()
    return 0


def fold(run: tyro.conf.Positional[Path], out: Path) -> int:
    """Fold the norms of a run away, and verify in float64 that its outputs stay.

    Args:
        run: Folder of the run.
        out: Folder for the folded run.
    """
    from normkit_papers import results
    from normkit_papers.train.fold_run import fold_run
    from normkit_papers.train.folder import load, save

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is not an empty folder; name another one")
    trained = load(run)
    if run in results.unfinished([run]):
        _write(f"warning: {run} has not ended; this folds its last checkpoint")
    made, found = fold_run(trained)
    save(out, made)
    _write(f"{found}\nsaved to {out}")
    return 0


def use(arguments: list[str]) -> int:
    """Use a trained run: translate lines, fold its norms."""
    return _dispatch(USES, arguments, "papers use")


USES: dict[str, Callable[..., int]] = {"translate": translate, "fold": fold}
COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo, "train": train, "study": study, "reproduce": reproduce, "report": report, "use": use,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _command_line[:] = arguments
    try:
        return _dispatch(COMMANDS, import_modules(arguments), "papers")
    except KeyboardInterrupt:
        return _complain("interrupted; the same command again continues", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _complain(f"this needs the package {error.name}; pip install 'normkit-papers[text,vision,ray]'")
    except OSError as error:
        what = error.strerror or str(error)
        return _complain(f"{what}: {error.filename}; what was written before is kept" if error.filename else what)
    except (ValueError, TypeError) as error:
        from pydantic import ValidationError

        from normkit_papers.fields import explain

        text = explain(error) if isinstance(error, ValidationError) else str(error)
        return _complain(text or type(error).__name__)


def import_modules(arguments: list[str]) -> list[str]:
    """Import each module or .py file after `--import`, and return the other arguments."""
    left, given = [], iter(arguments)
    for argument in given:
        option, is_joined, name = argument.partition("=")
        if option != "--import":
            left.append(argument)
            continue
        import_module(name if is_joined else next(given, ""))
    return left


def _dispatch(commands: Mapping[str, Callable[..., int]], arguments: list[str], prog: str) -> int:
    """Call the command that the first argument names, with the others parsed by tyro."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [(f"{prog} {name}", str(command.__doc__).splitlines()[0]) for name, command in commands.items()]
        more = "--import FILE, of every command, first imports a module, such as one that adds norms to normkit.NORMS."
        _write(f"{align(lines)}\n\n{prog} COMMAND --help lists the options of a command.\n{more}")
        return 0 if arguments else BAD_INPUT
    command = pick(commands, arguments[0], "command")
    if command in (train, use):
        return command(arguments[1:])
    return _parse(command, arguments[1:], f"{prog} {arguments[0]}")


def _parse(what: Any, arguments: list[str], prog: str, **more: Any) -> Any:
    """Call a function, or make settings, with arguments of the command line."""
    return tyro.cli(what, args=arguments, prog=prog, config=(tyro.conf.FlagCreatePairsOff,), **more)


_command_line: list[str] = []


def _typed(*default: str) -> str:
    """The command line as it is typed in a shell."""
    return shlex.join(["papers", *(_command_line or default)])


def _list(found: tuple[list[list[str]], dict[str, str]]) -> int:
    """Print recipes or studies, a line each, then which data is missing and why."""
    lines, missing = found
    _write("\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in align(lines).splitlines()))
    if missing:
        _write("\nmissing data:")
        for name, why in sorted(missing.items()):
            _write(textwrap.fill(f"  {name}: {why}", WIDTH, subsequent_indent="    "))
    return 0


def _show(found: Mapping[Path, Any], out: Path) -> None:
    """Print the table of runs, and write their page."""
    from normkit.watch import diagnose
    from normkit_papers.report import page, summary
    from normkit_papers.report.recorded import recorded

    if found:
        _write(summary.text(found))
        for run in recorded(found):
            for fault in diagnose(run.recording).faults if run.recording.quantities else ():
                _write(f"{run.label}: {fault}")
        made = page.Page(f"Report of {out.name}")
        page.add_runs(made, found)
        _write(f"report: {made.write(out / 'report.html')}")


def _failed(status: Mapping[Path, str]) -> int:
    """Name runs that failed or diverged; return the exit status."""
    bad = {folder: each for folder, each in status.items() if each != "done"}
    for folder, each in bad.items():
        _complain(f"{folder}: {each}")
    return 1 if bad else 0


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
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


def _complain(text: str, status: int = BAD_INPUT) -> int:
    """Write an error in one line to standard error, and return the exit status."""
    sys.stderr.write(f"papers: {escape(' '.join(text.split()))}\n")
    return status


def _write(text: str) -> None:
    """Write lines to standard output, with control characters of texts from files escaped."""
    sys.stdout.write(f"{escape(text, keep=chr(10))}\n")


if __name__ == "__main__":
    sys.exit(main())
