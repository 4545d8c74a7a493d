"""Jobs that the tests of lost workers kill in the middle."""

import os
import signal
import time

from normkit.lab.train.run import train


def noted_job(title, run, folder, command, kinds):
    """A study's job that records its process.

    It runs slowly enough to be killed in the middle.
    """
    with (folder / "pids").open("a", encoding="utf8") as file:
        file.write(f"{os.getpid()}\n")
    return train(run, folder, resume=True, on_progress=lambda tick: time.sleep(0.05), command=command)


def kill_one(folder, killed, over):
    """Wait for a checkpoint of a run in the middle, then kill the worker that trains it."""
    while not over.wait(0.02):
        found = sorted((folder / "checkpoints").glob("step-*.ckpt"))
        if found and int(found[-1].stem.split("-")[1]) >= 10:
            os.kill(int((folder / "pids").read_text(encoding="utf8").split()[0]), signal.SIGKILL)
            killed.append(found[-1].name)
            return
