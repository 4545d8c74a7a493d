"""The command `normkit`.

Exit status: 0 if all went well, 1 if the command found a failure (a fault in a run, a run that failed), 2 for bad
input and errors (one line on standard error), 130 after Ctrl-C, 143 after SIGTERM.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import normkit
from normkit._util import align, pick
from normkit_papers.cli.doctor import doctor
from normkit_papers.cli.folding import audit, calibrate, fold
from normkit_papers.cli.line import BAD_INPUT, INTERRUPTED, complain, write
from normkit_papers.cli.listing import list_, summary
from normkit_papers.cli.removing import remove_norms
from normkit_papers.cli.reporting import compare, figure, report, watch
from normkit_papers.cli.running import demo, train
from normkit_papers.cli.studying import study
from normkit_papers.cli.using import pronounce, translate

EXTRAS = {  # of packages that `demo` does not install
    **dict.fromkeys(("PIL", "pycocotools", "timm", "torchmetrics", "torchvision"), "vision"),
    **dict.fromkeys(("sacrebleu", "tokenizers"), "text"),
    "pyarrow": "watch",
    "ray": "ray",
    "transformers": "huggingface",
}

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "list": list_,
    "train": train,
    "pronounce": pronounce,
    "translate": translate,
    "calibrate": calibrate,
    "fold": fold,
    "remove-norms": remove_norms,
    "audit": audit,
    "report": report,
    "compare": compare,
    "figure": figure,
    "watch": watch,
    "doctor": doctor,
    "study": study,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # closed
        sys.stdout = Path(os.devnull).open("w", encoding="utf8")  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # standard output may be no file
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]  # where ± cannot be encoded
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        package = (error.name or "normkit").split(".")[0]
        if package == "normkit" or "pip install" in str(error):
            return complain(str(error))
        if not isinstance(error, ModuleNotFoundError):
            raise
        extra = EXTRAS.get(package, "demo")
        return complain(f"this needs the package {package}, which is not installed; pip install 'normkit[{extra}]'")
    except OSError as error:
        return complain(_describe(error, *arguments[:1]))
    except (ValueError, TypeError) as error:
        return complain(str(error) or type(error).__name__)
    except Exception as error:
        if "InvalidCxxCompiler" in str(error):  # torch.compile
            return complain("torch.compile needs a C++ compiler: install g++, name one in CXX, or do not compile")
        if type(error).__name__ != "SafetensorError":  # weights that cannot be read or written, as on a full disk
            raise
        return complain(str(error))


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        write(_overview())
        return 0 if arguments else BAD_INPUT
    if arguments[0] in ("-V", "--version"):
        write(f"normkit {normkit.__version__}")
        return 0
    name, *rest = arguments
    return pick(COMMANDS, name, "command")(rest) or 0


def _describe(error: OSError, command: str = "") -> str:
    """Name the problem and the file; for a full disk, explain how to continue."""
    what = error.strerror or str(error) or type(error).__name__
    if not error.filename:
        return what
    if error.errno != errno.ENOSPC:
        return f"{what}: {error.filename}"
    again = "this command again" + (" with --resume" if command in ("train", "remove-norms") else "")
    return f"{what}: {error.filename}; what was written before is kept: free some space, then run {again}"


def _overview() -> str:
    lines = [f"normkit {normkit.__version__}: swap, train, watch and fold away the norms of any Transformer", ""]
    lines.append(indent(align([(f"normkit {name}", summary(command)) for name, command in COMMANDS.items()]), "  "))
    return "\n".join([*lines, "", "normkit COMMAND --help lists the options of a command."])
