"""The command `normkit`.

Exit status: 0 if all went well, 1 if `diagnose` found a fault, 2 for bad input and errors (one line on standard error),
130 after Ctrl-C.
"""

import argparse
import csv
import importlib.util
import io
import math
import os
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from normkit import __version__, watch
from normkit._util import align, escape, write_whole
from normkit.bench import measure_norms
from normkit.fold.folders import audit_dir, example_for, fold_dir
from normkit.fold.plan import ONLINE
from normkit.models.export import check_target
from normkit.models.export import export as export_model
from normkit.models.huggingface import load_pretrained
from normkit.norms import NORMS, make, options
from normkit.removal.folders import Settings, remove_norms_dir
from normkit.removal.state import STATE

FOUND, BAD_INPUT, INTERRUPTED = 1, 2, 130
EVERY = 10.0  # seconds between lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(arguments)


def _show_warning(message: Warning | str, *_: Any) -> None:
    _complain(f"warning: {message}")


def _run(arguments: Sequence[str] | None) -> int:
    if sys.stdout is None:  # closed
        sys.stdout = Path(os.devnull).open("w", encoding="utf8")  # noqa: SIM115
    try:
        given = _parser().parse_args(arguments)
        for name in (*given.modules_before, *given.modules):
            import_module(name)
        return given.run(given)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        what = error.strerror or str(error) or type(error).__name__
        return _complain(f"{what}: {error.filename}" if error.filename else what)
    except (ImportError, TypeError, ValueError) as error:
        return _complain(str(error) or type(error).__name__)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # weights that cannot be read or written
            raise
        return _complain(str(error))


def import_module(name: str) -> None:
    """Import a module, or a .py file; a ValueError if there is none."""
    path = Path(name)
    sys.path.insert(0, str(path.parent.absolute()))
    module = path.stem if path.suffix == ".py" else name
    try:
        known = bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        known = False
    if not known:
        raise ValueError(f"--import {name}: found no such module or file; name a .py file or an installed module")
    try:
        importlib.import_module(module)
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f" at {Path(last.filename).name}:{last.lineno}" if Path(last.filename).is_file() else ""
        raise ValueError(f"--import {name}: {type(error).__name__}{where}: {error}") from error


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name the command whose options they are about."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        found, rest = super().parse_known_args(*given, **named)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; `{self.prog} --help` lists what is allowed\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("normkit", description="Swap, watch and fold away the norms of any Transformer.")
    parser.add_argument("--version", action="version", version=f"normkit {__version__}")
    modules: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE", "help": (
        "import a module or .py file first, such as one that adds norms to normkit.NORMS"
    )}  # fmt: skip
    parser.add_argument("--import", dest="modules_before", **modules)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = textwrap.dedent(f"    {run.__doc__}").strip()
        made = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(run=run)
        made.add_argument("--import", dest="modules", **modules)
        return made

    add("list", list_)
    _model(add("audit", audit))
    one = _model(add("fold", fold))
    one.add_argument("--out", type=Path, required=True, help="folder for the folded model")
    one.add_argument("--untie", action="store_true", help="give a tied output layer a weight of its own")
    one = _model(add("remove-norms", remove_norms))
    one.add_argument("--text", required=True, help="file with one text a line, or a data set of the Hub: org/name")
    one.add_argument("--out", type=Path, required=True, help="folder for the model without norms")
    one.add_argument("--second", metavar="TEXT", help="another text, to measure on alone")
    one.add_argument(
        "--steps", type=_positive, help="training steps; default: 300; of a language model's blocks, each: none"
    )
    one.add_argument("--budget", type=float, help="train nothing: remove norms for at most this together")
    one.add_argument("--length", type=_positive, help="most tokens of a text; default: the model's, up to 512")
    one.add_argument("--lr", type=_above_0, help="highest learning rate; default: 3e-4, of language models 1e-3")
    one.add_argument(
        "--multiply-adds", action="store_true", help="leave each norm as one, for float16 and 8-bit integers"
    )
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--seed", type=int, default=0, help="seed of the order of texts; default: 0")
    one.add_argument("--resume", action="store_true", help="continue an interrupted removal")
    one = _model(add("export", export))
    one.add_argument("--out", type=Path, required=True, help="file to write, .onnx or .pt2")
    one.add_argument("--int8", choices=("dynamic",), help="weights in 8-bit integers for each channel (.onnx)")
    one = add("diagnose", diagnose)
    one.add_argument("rows", type=Path, help="file of rows (.csv) that `normkit.record` wrote, or its folder")
    one = add("bench", bench)
    one.add_argument("norms", nargs="+", metavar="NORM", help="specs, as layer 'un(window=8)'")
    one.add_argument("--shape", type=_shape, default=(4096, 512), metavar="ROWSxCHANNELS", help="default: 4096x512")
    one.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    one.add_argument("--rounds", type=_positive, default=60, help="how often each norm runs; default: 60")
    one.add_argument("--threads", type=_positive, default=1, help="threads of PyTorch; one is pinned to a core")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--compiled", action="store_true", help="also each norm compiled; needs a C++ compiler")
    one.add_argument("--out", type=Path, help="file for the timings (.csv)")
    return parser


def _model(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model with safetensors")
    return parser


def list_(_: argparse.Namespace) -> int:
    """List the norms with their options."""
    common = options("layer").items()
    _write("Norms: a spec is a name, or a name with options as in 'un(window=8)'\n")
    for name, kind in NORMS.items():
        own = options(name)
        inference = "folds away at inference" if make(name, 16).offline else "stays at inference"
        inference = "folds away with groups=0" if not kind.batch_free and "groups" in own else inference
        statistics = "no batch statistics" if kind.batch_free else "batch statistics"
        _write(f"  {name:<11} {kind.__name__}: {statistics}, {inference}")
        text = ", ".join(f"{key}={value!r}" for key, value in own.items() if (key, value) not in common)
        for line in textwrap.wrap(text, 100):
            _write(f"{'':16}{line}")
    _write(f"\nOptions of all norms, with defaults: {', '.join(f'{key}={value!r}' for key, value in common)}")
    return 0


def audit(given: argparse.Namespace) -> int:
    """Report for each norm of a model what folding can make of it; nothing changes."""
    found, doubts = audit_dir(given.model)
    _write(str(found))
    if any(row.why.startswith(ONLINE) for row in found):
        _write("norms that compute statistics stay; `normkit remove-norms` takes them out of a trained model")
    for doubt in doubts:
        _write(f"warning: {doubt}; was this checkpoint converted for another class?")
    return 0


def fold(given: argparse.Namespace) -> int:
    """Fold the norms of a model away, and verify in float64 that nothing changed.

    A model whose norms compute statistics keeps its architecture: their gains become 1, and any program that opens the
    original opens the result. Its logits stay, or all outputs of a model without logits, and for sentence-transformers
    the last hidden states. Others, such as the states of T5's encoder, are scaled.
    """
    ProgressLine()("loading, tracing, folding, and comparing in float64", 0, 1, math.nan)
    found = fold_dir(given.model, given.out, given.untie)
    _write(str(found))
    if given.untie and not found.untied:
        _write("--untie changed nothing: no output layer is tied to an embedding")
    tied = [row for row in found if "tied to an embedding" in row.why]
    if tied and found.count("gain folded") == len(found) - len(tied) and all("rms" in row.norm for row in found):
        _write("for rotation all gains have to be 1: fold again with --untie, into another folder")
    if all(row.action == "kept" for row in found) and not found.untied:
        _write("no norm changed, so this is a copy; `normkit remove-norms` takes out norms that compute statistics")
    _write(f"saved to {given.out}")
    return 0


def remove_norms(given: argparse.Namespace) -> int:
    """Take the norms out of a trained model: fit, train towards its outputs, fold, compare.

    With --budget nothing is trained: the norms that cost at most this together go (nats of loss for language models,
    1 - cosine for encoders), the others stay. This is the default for language models, with 0.1 nats; with --steps all
    norms go.
    """
    _check_device(given.device)
    names = ("text", "second", "steps", "budget", "length", "lr", "multiply_adds", "device", "seed")
    settings = Settings(**{name: getattr(given, name) for name in names})
    progress = ProgressLine()
    progress("reading model and text", 0, 1, math.nan)
    try:
        found = remove_norms_dir(given.model, given.out, settings, resume=given.resume, on_progress=progress)
    except KeyboardInterrupt:
        saved = (given.out / STATE).is_dir()  # training saves now and then, a budget nothing
        how = "the same command with --resume continues" if saved else "nothing was saved yet, so begin again"
        return _complain(f"interrupted; {how}", INTERRUPTED)
    _write(f"{found}\n\nsaved to {given.out}")
    return 0


class ProgressLine:
    """Writes a line of progress to standard error, at most one in ten seconds."""

    def __init__(self) -> None:
        self.stage, self.last = "", 0.0

    def __call__(self, stage: str, done: int, of: int, seconds: float) -> None:
        """Write how much of a stage is done, and the time left."""
        if stage == self.stage and time.monotonic() - self.last < EVERY:
            return
        self.stage, self.last = stage, time.monotonic()
        left = "" if math.isnan(seconds) else f", about {_duration(seconds)} left"
        print(f"{stage} {done} of {of}{left}" if of > 1 else stage, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Return seconds or minutes."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def export(given: argparse.Namespace) -> int:
    """Write a model as an ONNX or torch.export file, run it, and compare the outputs."""
    check_target(given.out, given.int8)
    ProgressLine()("loading the model, then tracing, writing and running it", 0, 1, math.nan)
    model = load_pretrained(given.model)
    if given.out.suffix == ".onnx" and any(each.dtype is torch.bfloat16 for each in model.parameters()):
        _write("the weights are bfloat16, in which onnxruntime lacks operations: exported in float32")
        model = model.float()
    found = export_model(model, given.out, int8=given.int8, **example_for(model))
    _write(str(found))
    return 0


def diagnose(given: argparse.Namespace) -> int:
    """Find faults of a training run in its recorded rows.

    Faults are listed with remedies; the exit status is 1. Checks for which the rows do not suffice are listed with how
    to record more; exit status 2 if these are all.
    """
    found = watch.diagnose(given.rows)
    _write(str(found))
    return FOUND if found.faults else 0 if found.checked else BAD_INPUT


def bench(given: argparse.Namespace) -> int:
    """Measure the time of norms relative to nn.LayerNorm.

    Norms take turns, round by round, and a ratio is taken within a round; the median over rounds is shown, with the
    20th and 80th percentile. Norms with a warm-up are measured after it.
    """
    _check_device(given.device)
    if given.out is not None and (given.out.is_dir() or not given.out.parent.is_dir()):
        raise ValueError(f"--out {given.out} is no file in a folder that exists; name one such as timings.csv")
    rows = measure_norms(
        given.norms, *given.shape, dtype=given.dtype, rounds=given.rounds, device=given.device,
        compiled=given.compiled, threads=given.threads,
    )  # fmt: skip
    columns = ("pass", "norm", "provider", "ms", "ratio", "low", "high")
    lines = [columns, *([str(row[column]) for column in columns] for row in rows)]
    _write(align(lines, right=range(3, 7), heads=1))
    for why in dict.fromkeys(row["verdict"] for row in rows if row["verdict"]):
        _write(f"No verdict: {why}.")
    if given.out is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _write(f"wrote {write_whole(given.out, text.getvalue().encode())}")
    return 0


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device; leave it out for the CPU")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _above_0(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return found


def _shape(text: str) -> tuple[int, int]:
    """Rows and channels."""
    rows, _, channels = text.lower().partition("x")
    try:
        return _positive(rows), _positive(channels)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be rows x channels, as 4096x512; got {text!r}") from None


def _write(text: str) -> None:
    """Write lines to standard output, with control characters of texts from files escaped."""
    print(escape(text, keep="\n"))


def _complain(text: str, status: int = BAD_INPUT) -> int:
    """Write an error in one line to standard error, and return the exit status."""
    print(f"normkit: {' '.join(text.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
