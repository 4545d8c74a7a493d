"""Programs forked from a process that has imported Lightning.

A new Python takes ten seconds for that.
"""

import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest

FORKS = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
FORKS.set_forkserver_preload(["normkit_papers.train.run"])


class Program:
    """A program in the background: `python -c CODE ARGUMENTS` with these variables."""

    def __init__(self, code: str, *arguments: str, **variables: str):
        self.output = Path(tempfile.mkdtemp())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.process = FORKS.Process(target=_run, args=(code, arguments, environment, self.output))
        self.process.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid or 0

    def printed(self) -> str:
        """Its output so far."""
        path = self.output / "out"
        return path.read_text(encoding="utf8") if path.exists() else ""

    def ended(self, timeout: float = 300) -> tuple[int, str, str]:
        """Wait for its end; the exit code, the output and the messages."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()  # else pytest would wait for it at its own end
            pytest.fail(f"a program still ran after {timeout} seconds")
        out, err = ((self.output / name).read_text(encoding="utf8") for name in ("out", "err"))
        shutil.rmtree(self.output)
        return self.process.exitcode or 0, out, err


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


def two_ranks(code: str) -> None:
    """Run a program in two processes with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    ranks = [Program(code, **variables, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    ended = [rank.ended() for rank in ranks]
    assert [exit_code for exit_code, _, _ in ended] == [0, 0], ended
