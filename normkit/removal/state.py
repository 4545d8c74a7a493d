"""State of a removal inside its output folder, so that it can be continued."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normkit._util import warn, write_whole

STATE = ".removal"  # folder of the state, which goes at the end


def check_out(path: Path, out: Path, resume: bool) -> None:
    """Raise a ValueError unless a removal can begin, or continue, in a folder."""
    if out.resolve() == path.resolve():
        raise ValueError(f"{out} is the model itself, which is kept; name another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    left = {file.name for file in out.iterdir()} - {".lock"} if out.is_dir() else set()
    if STATE in left and not resume:
        raise ValueError(f"{out} holds an interrupted removal; continue it with --resume, or delete it")
    if STATE not in left and resume:
        raise ValueError(f"{out} holds no interrupted removal to resume; leave out --resume")
    if left and not resume:
        raise ValueError(f"--out {out} is not an empty folder; name another one")


@contextlib.contextmanager
def claimed(path: Path, out: Path, settings: Mapping[str, Any], resume: bool) -> Iterator[Path]:
    """Give the file of a removal's checkpoint inside the block.

    It stays with the settings if the block raises after a checkpoint was written; then `resume` needs equal settings.
    """
    check_out(path, out, resume)
    state, now = out / STATE, {"model": str(path.resolve()), **settings}
    if resume and not (state / "checkpoint.pt").is_file():
        warn(f"nothing was saved in {out} before the interruption; the training begins again")
    if resume and (state / "settings.json").is_file():
        before = json.loads((state / "settings.json").read_text(encoding="utf8"))
        if changed := [f"{key} was {before.get(key)}" for key in now if now[key] != before.get(key)]:
            raise ValueError(f"--resume needs the settings of the interrupted removal; {', '.join(changed)}")
    write_whole(state / "settings.json", json.dumps(now).encode())
    checkpoint, ended = state / "checkpoint.pt", False
    try:
        yield checkpoint
        ended = True
    finally:
        if ended or not checkpoint.exists():
            shutil.rmtree(state)
            with contextlib.suppress(OSError):  # it has the result
                out.rmdir()
