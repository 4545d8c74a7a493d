"""Result files: one JSON file a run, written whole or not at all, validated when read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from normkit._util import open_regular, write_whole

FILE = "result.json"
PROGRESS = "progress.json"
SETTINGS = "run.json"
SCHEMA = 1
NUMBER = (int, float)
NAMES: dict[Any, str] = {
    NUMBER: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "a JSON object", list: "a list"
}  # fmt: skip
LARGEST = 2**63


class Maybe(NamedTuple):
    """A field that may be null or missing."""

    kind: Any


SHAPE: dict[str, Any] = {  # "*" stands for any name
    "schema": int,
    "run": {"task": str, "data": str, "model": {"norm": str, "norm_at": Maybe({"*": str})}},
    "command": str,
    "status": str,
    "where": {},
    "averaged": Maybe(int),  # checkpoints
    "parameters": int,
    "curve": [{"step": int, "train_loss": NUMBER}],
    "valid": [{"step": int, "loss": NUMBER}],
    "scores": {"*": {"*": Maybe(NUMBER)}},
    "speed": {"*": Maybe(NUMBER)},
    "fold": Maybe(
        {
            "foldable": Maybe(str),
            "max_error": Maybe(NUMBER),
            "native_error": Maybe(NUMBER),
            "rows": Maybe([{"name": str, "action": str, "into": Maybe([str]), "why": Maybe(str)}]),
        }
    ),
    "timing": Maybe(
        {
            "what": Maybe(str),
            "pairs": [{"a": str, "b": str, "ratio": NUMBER, "low": NUMBER, "high": NUMBER, "n": int}],
            "noise": Maybe(NUMBER),  # ratio of a variant to itself
            "obstacle": Maybe(str),  # reason why the timings allow no verdict
        }
    ),
    "seconds": {"train": Maybe(NUMBER), "score": Maybe(NUMBER)},
}


def write(folder: str | Path, result: dict[str, Any]) -> Path:
    """Write `folder/result.json`; on OSError the old file stays as it was."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
    return write_whole(Path(folder) / FILE, text.encode())


def read(path: str | Path) -> dict[str, Any]:
    """Read the result in a file, or in a folder's result.json; ValueError without a valid one."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        result = _load(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a run writes it when it ends") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is cut short or not JSON: {error}; leave this run out, or train it again") from None
    try:
        check(result, SHAPE, "")
    except ValueError as error:
        raise ValueError(f"{path} is no result of a run: {error}") from None
    if result["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {result['schema']}; this version of normkit reads {SCHEMA}")
    return result


def ended(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that ended by itself, if the folder has one."""
    found = read(folder) if (folder / FILE).is_file() else None
    return None if found is None or found["status"].startswith("interrupted") else found


def note(folder: str | Path, parameters: int, curve: list[dict[str, Any]], valid: list[dict[str, Any]]) -> Path:
    """Write `folder/progress.json`: the losses so far of a run in progress."""
    data = json.dumps({"parameters": parameters, "curve": curve, "valid": valid}, allow_nan=True)
    return write_whole(Path(folder) / PROGRESS, data.encode())


def live(folder: str | Path) -> dict[str, Any]:
    """Read a run folder as a result: result.json or, if that is newer, its progress.

    ValueError if the folder has no settings of a run, or a file that cannot be read.
    """
    folder = Path(folder)
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name in (FILE, PROGRESS, SETTINGS)}
    if FILE in files and files[FILE] >= files.get(PROGRESS, 0):
        return read(folder)
    if SETTINGS not in files:
        raise ValueError(f"{folder} is no folder of a run: it has no {SETTINGS}; `normkit train` makes such folders")
    name = SETTINGS
    try:
        run = _load(folder / name)
        check(run, SHAPE["run"], "")
        name = PROGRESS
        so_far: Any = {"parameters": 0, "curve": [], "valid": []}
        if PROGRESS in files:
            so_far = _load(folder / name)
        result = {key: so_far[key] for key in ("parameters", "curve", "valid")} | {
            "schema": SCHEMA,
            "run": run,
            "command": "",
            "status": f"in training, step {so_far['curve'][-1]['step']:,}" if so_far["curve"] else "starting",
            **{key: {} for key in ("where", "scores", "speed", "seconds")},
        }
        check(result, SHAPE, "")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder / name} is cut short or no file of a run: {error}") from None
    return result


def is_unfinished(folder: Path) -> bool:
    """Return True for a run in progress; a folder of weights alone was folded or calibrated."""
    result, progress, weights = ((folder / name).exists() for name in (FILE, PROGRESS, "model.safetensors"))
    return not result and (progress or not weights)


def find(paths: Iterable[str | Path], unfinished: bool = False) -> dict[Path, dict[str, Any]]:
    """Read all results in files and folders, at any depth, by the folder of each.

    Args:
        paths: Result files, or folders.
        unfinished: True to include the progress of runs without a result.

    Raises:
        ValueError: if a path does not exist, holds no result, or a result cannot be read.
    """
    paths = [Path(path) for path in paths]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        files += sorted(path.rglob(FILE)) if path.is_dir() else [path]
        if unfinished:
            files += [file for file in sorted(path.rglob(SETTINGS)) if is_unfinished(file.parent)]
    if not files:
        raise ValueError(f"no {FILE} in {', '.join(map(str, paths))}; `normkit train` and `normkit demo` write them")
    return {file.parent: live(file.parent) if file.name == SETTINGS else read(file) for file in dict.fromkeys(files)}


def _load(path: Path) -> Any:
    with open_regular(path) as file:
        return json.loads(file.read().decode("utf8"))


def check(value: Any, shape: Any, name: str) -> None:
    """Raise a ValueError that names the field if a value does not have a shape."""
    kind = dict if isinstance(shape, dict) else list if isinstance(shape, list) else shape
    if isinstance(shape, Maybe):
        if value is not None:
            check(value, shape.kind, name)
    elif not isinstance(value, kind) or (kind is not bool and type(value) is bool):
        raise ValueError(f"{name or 'it'} must be {NAMES[kind]}, found {type(value).__name__}")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            fields = value if key == "*" else [key]
            for field in fields:
                if field not in value and not isinstance(inner, Maybe):
                    raise ValueError(f"it has no {name}{'.' if name else ''}{field}")
                check(value.get(field), inner, f"{name}{'.' if name else ''}{field}")
    elif isinstance(shape, list):
        for place, item in enumerate(value):
            check(item, shape[0], f"{name}[{place}]")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name} is too large a number")
