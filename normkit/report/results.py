"""One JSON file a run: written whole or not at all, checked when read."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "result.json"
SCHEMA = 1
FIELDS = {
    "schema": int,
    "run": dict,
    "command": str,
    "status": str,
    "where": dict,
    "parameters": int,
    "curve": list,
    "valid": list,
    "scores": dict,
    "speed": dict,
    "seconds": dict,
}


def write(folder: str | Path, result: dict[str, Any]) -> Path:
    """Write `folder/result.json`; the old file stays whole where the new one cannot be written (OSError)."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
    return write_whole(Path(folder) / FILE, text.encode())


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file so that `path` holds all of the old bytes or all of the new ones; OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path


def read(path: str | Path) -> dict[str, Any]:
    """The result in a file, or in a folder's result.json; ValueError, naming the file, where there is none."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a run writes it when it ends") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is cut short or not JSON: {error}") from None
    if not isinstance(result, dict):
        raise ValueError(f"{path} is no result of a run: it holds a {type(result).__name__}")
    for name, kind in FIELDS.items():
        if not isinstance(result.get(name), kind):
            found = "nothing" if name not in result else type(result[name]).__name__
            raise ValueError(f"{path} is no result of a run: {name} must be a {kind.__name__}, found {found}")
    if result["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {result['schema']}; this version of normkit reads {SCHEMA}")
    return result


def find(paths: Iterable[str | Path]) -> dict[Path, dict[str, Any]]:
    """All results in files and folders, however deep, by the folder of each; ValueError where there are none."""
    paths = [Path(path) for path in paths]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
        files += sorted(path.rglob(FILE)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no {FILE} in {', '.join(map(str, paths))}; `normkit train` and `normkit demo` write them")
    return {file.parent: read(file) for file in dict.fromkeys(files)}
