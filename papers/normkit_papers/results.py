"""Result files: one JSON file a run, written whole or not at all, validated when read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normkit._util import write_whole

FILE = "result.json"
SCHEMA = 1
KEYS = {"run", "command", "status", "where", "parameters", "curve", "valid", "scores", "speed", "seconds"}


def write(folder: str | Path, result: dict[str, Any]) -> Path:
    """Write `folder/result.json`; on OSError the old file stays as it was."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
    return write_whole(Path(folder) / FILE, text.encode())


def read(path: str | Path) -> dict[str, Any]:
    """Read the result in a file, or in a folder's result.json; ValueError without a valid one."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a run writes it when it ends") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is cut short or not JSON: {error}; leave this run out, or train it again") from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA or not result.keys() >= KEYS:
        raise ValueError(f"{path} is no result of a run, of schema {SCHEMA}; train the run again")
    return result


def exists(folder: Path) -> bool:
    """Return True if a folder has a result file."""
    return (folder / FILE).is_file()


def ended(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that ended by itself, if the folder has one."""
    found = read(folder) if exists(folder) else None
    return None if found is None or found["status"].startswith("interrupted") else found


def unfinished(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs, at any depth, that have not ended."""
    runs = dict.fromkeys(file.parent for path in paths for file in sorted(Path(path).rglob("run.json")))
    folded = {each for each in runs if not exists(each) and (each / "model.safetensors").is_file()}
    return [each for each in runs if each not in folded and ended(each) is None]


def find(paths: Iterable[str | Path]) -> dict[Path, dict[str, Any]]:
    """Read all results in files and folders, at any depth, by the folder of each.

    Raises:
        ValueError: If a path does not exist, holds no result, or a result cannot be read.
    """
    paths, files = [Path(path) for path in paths], list[Path]()
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        if not path.is_dir() and path.suffix != ".json":
            raise ValueError(f"{path} is no run; give the folder of one, or rows (.csv) without --figure and --compare")
        files += sorted(path.rglob(FILE)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no {FILE} in {', '.join(map(str, paths))}; `papers train` and `papers demo` write them")
    return {file.parent: read(file) for file in dict.fromkeys(files)}
