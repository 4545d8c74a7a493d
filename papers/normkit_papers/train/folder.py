"""Run folders: settings, vocabularies, weights, result; a lock while a run writes one."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from torch import nn

from normkit._util import truncate, write_whole
from normkit_papers.data.vocab import Vocab, vocabulary
from normkit_papers.report.settings import flat
from normkit_papers.train.build import Vocabularies, build_model
from normkit_papers.train.config import Run
from normkit_papers.train.weights import load_weights, save_weights

CHECKPOINTS = "checkpoints"
BEST = "best"  # checkpoints of the best validations

LOCK = ".lock"
MOVABLE = ("name", "device", "threads", "workers")
"""Settings that may change when a run is resumed: they do not change its result."""


class Locked(ValueError):
    """Another process is writing a run folder."""


class Loaded(NamedTuple):
    """Content of a run folder: settings, trained model in evaluation mode, vocabularies."""

    run: Run
    model: nn.Module
    vocabularies: Vocabularies


def load(folder: str | Path) -> Loaded:
    """Load a run folder.

    Raises:
        ValueError: If the folder is not one of a run, or a file in it is missing or damaged.
    """
    folder = Path(folder)
    run, vocabularies = read_run(folder), read_vocabularies(folder)
    try:
        model = build_model(run.task, run.model, vocabularies)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; if its norm is your own, add --import FILE") from None
    load_weights(model, folder / "model.safetensors")
    return Loaded(run, model.eval(), vocabularies)


def save(folder: str | Path, loaded: Loaded) -> None:
    """Write a folder that `load` reads.

    Raises:
        ValueError: If the settings do not describe the model.
    """
    folder = Path(folder)
    write_run(folder, loaded.run, loaded.vocabularies)
    save_weights(loaded.model, folder / "model.safetensors")
    load(folder)


def read_run(folder: Path) -> Run:
    """Read the settings in a run folder.

    Raises:
        ValueError: If it has none, or they are damaged.
    """
    path = folder / "run.json"
    if not path.is_file():
        problem = "it has no run.json" if folder.exists() else "there is no such folder"
        runs = truncate(sorted(str(path.parent) for path in folder.glob("*/run.json")))
        advice = f"runs in it are {', '.join(runs)}" if runs else "`papers train` and `papers demo` write them"
        raise ValueError(f"{folder} is not a run folder: {problem}; {advice}")
    try:
        return Run.from_json(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; copy it from the folder in which the run was trained") from None


def write_run(folder: Path, run: Run, vocabularies: Vocabularies) -> None:
    """Write the settings and vocabularies of a run."""
    plain = {name: vocab.plain() for name, vocab in vocabularies.items()}
    write_whole(folder / "run.json", run.to_json().encode())
    write_whole(folder / "vocab.json", json.dumps(plain, ensure_ascii=False).encode())


def read_vocabularies(folder: Path) -> dict[str, Vocab]:
    """Read the vocabularies in a run folder.

    Raises:
        ValueError: If they are missing or damaged.
    """
    path = folder / "vocab.json"
    try:
        texts = json.loads(path.read_text(encoding="utf8"))
        if not isinstance(texts, dict):
            raise ValueError("it must be a JSON object of vocabularies")
        return {name: vocabulary(plain) for name, plain in texts.items()}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; copy it from the folder in which the run was trained") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def check_vocabularies(run: str, before: Vocabularies, vocabularies: Vocabularies) -> None:
    """Raise a ValueError if the data has other words or classes than a run had."""
    for name, vocab in vocabularies.items():
        old, new = before[name].symbols if name in before else [], vocab.symbols
        if old != new:
            raise ValueError(
                f"the run {run} has {len(old):,} {name} words, the data now {len(new):,} or others; it needs "
                "the data and the vocabulary that it was trained with"
            )


def differences(found: Mapping[str, Any], run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the settings, but those in MOVABLE, that differ from a run's: both values."""
    before, now = (flat(json.loads(json.dumps(tree))) for tree in (found, dataclasses.asdict(run)))
    names = dict.fromkeys((*now, *before))
    both = {name: (before.get(name), now.get(name)) for name in names if name not in MOVABLE}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def check_free(folder: Path, run: Run, resume: bool) -> None:
    """Raise a ValueError unless a folder is empty or, with `resume`, holds the same run."""
    if resume and (folder / "run.json").exists():
        found = differences(dataclasses.asdict(read_run(folder)), run)
        changed = [f"{name} ({before}, not {now})" for name, (before, now) in found.items()]
        if changed:
            raise ValueError(f"{folder} holds a run with another {', '.join(changed)}; resume with its own settings")
    elif folder.exists() and (found := sorted(path.name for path in folder.iterdir() if path.name != LOCK)):
        raise ValueError(
            f"{folder} is not empty, it has {', '.join(truncate(found))}; continue a run in it with --resume, name "
            "another folder (--out), or delete this one"
        )


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run folder to resume from, oldest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*.ckpt"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder inside the block; the system releases the lock of a process that dies.

    Raises:
        Locked: If another process holds the lock.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        with FileLock(path, blocking=False):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout:
        raise Locked(
            f"{folder} is being written by another process; wait for its end, stop it, or name another folder (--out)"
        ) from None
    finally:
        if new:
            with contextlib.suppress(OSError):  # it has content
                folder.rmdir()
