"""Jobs of the tests of workers.

Every worker imports this file, which therefore imports next to nothing.
"""

import functools
import os
import signal
import sys
import time

from normkit_papers.studies.workers import on_devices, send
from normkit_papers.train.progress import Progress


def die(title, *_):
    """Kill the worker, once its parent has received the start."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def noted_job(title, run, folder, command, kinds):
    """A study's job that records its process.

    It runs slowly enough to be killed in the middle.
    """
    from normkit_papers.train.run import train

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


def job_with_forked_ranks(*arguments):
    """A study's job, but the processes of its devices are forked.

    Each new Python would import Lightning.
    """
    from normkit_papers.studies.runner import study_job
    from torch.multiprocessing.spawn import start_processes

    starts = sys.modules["torch.multiprocessing.spawn"]
    starts.spawn = functools.partial(start_processes, start_method="fork")
    return study_job(*arguments)


def answer_of_ranks(title, folder):
    """Let two processes note their rank and what `send` returns, as those of a training do."""
    on_devices(2, note_rank, title, folder)
    return sorted(path.read_text(encoding="utf8") for path in folder.iterdir())


def note_rank(title, folder):
    """Write the variables of this process; of the two, the first alone sends."""
    rank = os.environ["LOCAL_RANK"]
    (folder / rank).write_text(f"{rank} of {os.environ['WORLD_SIZE']}: {send(title, rank)}", encoding="utf8")


def answer(title, what):
    """Send a message, return another."""
    send(title, Progress(what, 1, 1))
    return what.upper()


def fail(title):
    """Raise an error."""
    raise ValueError(f"{title} cannot be")


def wait_to_be_stopped(title):
    """Send messages until the parent requests an end."""
    while not send(title, Progress("waiting", 0, 1)):
        time.sleep(0.01)
    return "stopped"
