"""Parse arguments, write lines, report errors."""

import contextlib
import functools
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from normkit._util import escape, require

BAD_INPUT, INTERRUPTED = 2, 130
MOST_SEEDS = 1000


def command(function: Callable[..., int]) -> Callable[[list[str]], int]:
    """Make a command of a function, to be called with the words after the command's name.

    Parameters become flags, positional-only ones arguments without a flag; the docstring becomes the help.
    """

    @functools.wraps(function)
    def run(arguments: list[str]) -> int:
        if not arguments and not inspect.signature(function).parameters:  # `list` must run without tyro
            return function()
        given = functools.wraps(function)(lambda *positional, **flags: (positional, flags))
        positional, flags = parse_arguments(given, arguments, function.__name__.strip("_").replace("_", "-"))
        return function(*positional, **flags)

    return run


def parse_arguments(target: Any, arguments: list[str], name: str, **default: Any) -> Any:
    """Parse arguments into a function's parameters or a dataclass's fields.

    Args:
        target: The function or dataclass.
        arguments: Words after the command.
        name: Name of the command.
        default: Values for arguments that are not given, as `tyro.cli` takes them.

    Raises:
        ValueError: If an argument is wrong, with a message of one line.
    """
    import tyro

    if any(not word and not before.startswith("-") for before, word in itertools.pairwise([name, *arguments])):
        raise ValueError("an argument is empty; give a word, a file or a folder, . for this one")
    for option in ("--out", "--data", "--name"):
        if f"{option}=" in arguments or (option, "") in itertools.pairwise(arguments):
            raise ValueError(f"{option} is empty; give {'a folder, . for this one' if option == '--out' else 'a name'}")
    box = io.StringIO()
    shown: Any = target if inspect.isclass(target) else _with_plain_help(target)
    about = None if inspect.isclass(target) else _description(target)
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(shown, args=arguments, prog=f"normkit {name}", description=about, **default)
    except SystemExit as ended:
        if not ended.code:
            raise
        message = _one_line(box.getvalue())
        if message.startswith("Missing from"):
            missing = [each for each in shown.required if f"{each} " in message]
            message = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ValueError(f"{message}; `normkit {name} --help` shows what there is") from None


def _description(function: Callable) -> str:
    """Wrap what a docstring has before its arguments to the width of the terminal.

    tyro leaves long lines, and joins lines that begin with a letter, so further lines are indented.
    """
    paragraphs = (inspect.getdoc(function) or "").partition("\nArgs:")[0].strip().split("\n\n")
    width = shutil.get_terminal_size().columns
    return "\n\n".join(textwrap.fill(text, width, subsequent_indent="  ") for text in paragraphs)


def _with_plain_help(function: Callable) -> Any:
    """Wrap a function so that tyro shows positional arguments by name, and no empty defaults.

    The attribute `required` lists the arguments without default, as `--help` shows them.
    """
    from tyro.conf import FlagCreatePairsOff, arg

    def wrapper(*positional: Any, **flags: Any) -> Any:
        return function(*positional, **flags)

    parameters, required = [], []
    for one in inspect.signature(function).parameters.values():
        options: dict[str, Any] = {"name": one.name.rstrip("_")} if one.name.endswith("_") else {}
        kind, positional = one.annotation, one.kind is one.POSITIONAL_ONLY
        inner = [each for each in typing.get_args(kind) if each is not type(None)]
        if positional:
            several = typing.get_origin(kind) is tuple
            metavar = f"{one.name.upper().removesuffix('S')} ..." if several else one.name.upper()
            options["metavar"] = metavar if one.default is one.empty else f"[{metavar}]"
        elif len(inner) < len(typing.get_args(kind)):
            choices = ",".join(map(str, typing.get_args(inner[0])))
            options["metavar"] = f"{{{choices}}}" if choices else inner[0].__name__.upper()
        if one.default in (None, False, "", ()):
            options["help_behavior_hint"] = ""
        if one.default is one.empty:
            options["help_behavior_hint"] = "(required)"
            required.append(one.name.upper() if positional else f"--{one.name}")
        if one.default is False:
            kind = FlagCreatePairsOff[kind]  # no --no-show
        parameters.append(one.replace(annotation=Annotated[kind, arg(**options)]))
    made: Any = wrapper
    made.__doc__ = re.sub(r"\n {8,}", " ", inspect.getdoc(function) or "")  # tyro keeps breaks in Args
    made.required = required
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = {one.name: one.annotation for one in parameters}
    return made


def _one_line(box: str) -> str:
    r"""Extract the first sentence of tyro's box, and the option that it proposes.

    >>> _one_line("╭─ Oh ─╮\n│ Unknown: --sed │\n│ ─── │\n│ Perhaps you meant: │\n│ --seed INT │\n╰──╯")
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
    message = _reword_value_error(" ".join(sections[0] if sections else lines).rstrip("."))
    near = [line.split()[0].rstrip(",") for part in sections for line in part if line.startswith("--")]
    return f"{message} (did you mean {near[0]!r}?)" if near and "Perhaps you meant:" in lines else message


def _reword_value_error(message: str) -> str:
    """Name the option and what it takes, where tyro quotes a message of Python.

    >>> _reword_value_error("Error parsing --steps: invalid literal for int() with base 10: 'abc'")
    "--steps must be a whole number; got 'abc'"
    >>> _reword_value_error("Error parsing run.model: width must be at least 1; got 0")
    '--model.width must be at least 1; got 0'
    """
    message = re.sub(r"^Error parsing run\.(\w+): (?:\1\.)?", r"--\1.", message)
    kinds = "|".join((r"invalid literal for int\(\) with base 10:", "could not convert string to float:"))
    if found := re.fullmatch(rf"Error parsing (--\S+): .*?({kinds}) (.*)", message):
        option, reason, value = found.groups()
        return f"{option} must be a {'whole number' if 'int' in reason else 'number'}; got {value}"
    return message


def check_seeds(seeds: int) -> None:
    """Raise a ValueError for a number of seeds whose runs could not even be listed."""
    require(1 <= seeds <= MOST_SEEDS, "seeds", seeds, f"at least 1 and at most {MOST_SEEDS:,}")


def typed(*words: str) -> str:
    """Format a command as it is typed in a shell."""
    return shlex.join(["normkit", *words])


def check_writable(folder: Path) -> None:
    """Check that a command can make a folder and files in it; nothing stays.

    Raises:
        ValueError: if the folder cannot be made or written to.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"--out {folder} is no folder that can be written to ({why}); name another folder") from None
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def progress_console(stderr: bool = False) -> Any:
    """Return a console; if its reader ends, as `head` does, the command is interrupted.

    So training saves its state.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            complain("the reader of the output has ended: interrupted")
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            signal.raise_signal(signal.SIGINT)

    return Output(stderr=stderr)


def write(text: str) -> None:
    """Write lines to standard output, with control characters of texts from files escaped."""
    print(escape(text, keep="\n"))  # nowhere if standard output is closed


def complain(text: str, status: int = BAD_INPUT) -> int:
    """Write an error in one line to standard error, and return the exit status."""
    print(f"normkit: {escape(' '.join(text.split()))}", file=sys.stderr)
    return status
