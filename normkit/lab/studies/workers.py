"""Runs side by side: processes of one thread each, that tell how far they are and end when they are asked to."""

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from normkit.lab.train.config import Run
from normkit.lab.train.distributed_env import first
from normkit.lab.train.progress import Progress

RETRIES = 3  # how often a job whose process was lost is started again
STARTED = "started"  # what a worker tells first of a job
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",  # glibc would map every large tensor afresh
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "SLURM_JOB_NAME": "interactive",  # Lightning's word for: these processes are not SLURM's tasks
    "SLURM_PROCID": "0",
}

_queue: Any = None  # of this worker process, set by _enter
_stop: Any = None


class Workers:
    """A few processes for jobs; `with Workers(2) as workers: workers.submit(title, job, ...)`.

    `ended()` yields title and outcome of each job as it ends, and hands what jobs tell meanwhile to `on_tell`. The
    outcome is what the job returned, or the exception that ended it. `stop()` asks all jobs to end.

    A process that is killed, as where memory runs out, takes the others with it: all jobs that were running are started
    again in new ones, `RETRIES` times at most, for whose process it was cannot be told.
    """

    def __init__(self, count: int, on_tell: Callable[[str, Any], None]):
        self.count, self.on_tell = count, on_tell
        self._jobs: dict[Future[Any], tuple[Any, ...]] = {}
        self._losses: Counter[str] = Counter()
        self._stopped = False
        self._open()

    def _open(self) -> None:
        context = multiprocessing.get_context("spawn")  # a killed process may leave a lock of these locked
        self._messages, self._stop, self._running = context.SimpleQueue(), context.Event(), set[str]()  # told at once
        self._pool = ProcessPoolExecutor(self.count, context, _enter, (self._messages, self._stop))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        try:
            for _ in self.ended():  # hears them out: a full pipe would hold them up
                pass
            self._pool.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:  # asked twice
            for process in multiprocessing.active_children():
                process.terminate()
            raise

    def submit(self, title: str, job: Callable[..., Any], *arguments: Any) -> None:
        """Let a worker do `job(title, *arguments)`; a function of a module."""
        with environment(), _uninterrupted():  # processes start at the first submit, and inherit both
            self._jobs[self._pool.submit(_run, job, title, *arguments)] = (title, job, *arguments)

    def stop(self) -> None:
        """Ask running jobs to end, and start no further ones."""
        self._stopped = True
        self._stop.set()
        for job in self._jobs:
            job.cancel()

    def ended(self) -> Iterator[tuple[str, Any]]:
        """Jobs as they end, until all have; those never started are left out."""
        while self._jobs:
            self._listen()
            done, _ = concurrent.futures.wait(self._jobs, 0.2, concurrent.futures.FIRST_COMPLETED)
            if any(map(_lost, done)):
                self._pool.shutdown()  # waits until all jobs and processes have ended
                done = list(self._jobs)
                self._listen()
                titles = {title for title, *_ in self._jobs.values()}
                self._losses.update(titles & self._running or titles)
                self._open()
            for job in done:
                title, *rest = self._jobs.pop(job)
                self._listen()
                self._running.discard(title)
                if job.cancelled() or isinstance(job.exception(), _NeverStarted) or (_lost(job) and self._stopped):
                    continue
                if not _lost(job):
                    yield title, job.exception() or job.result()
                elif self._losses[title] > RETRIES:
                    count = self._losses[title]
                    why = f"its process, or one beside it, was killed {count} times, as where memory runs out"
                    yield title, RuntimeError(f"{why}; try fewer processes at a time")
                else:
                    self.on_tell(title, Progress("a process was killed, starting again", 0, 1))
                    self.submit(title, *rest)

    def _listen(self) -> None:
        while not self._messages.empty():
            title, message = self._messages.get()
            if message == STARTED:
                self._running.add(title)
            else:
                self.on_tell(title, message)


def train_job(title: str, run: Run, folder: Path, command: str, resume: bool = False) -> dict[str, Any]:
    """A worker's job: train, or with `resume` go on where it stopped, telling the parent."""
    from normkit.lab.train.run import train

    return train(run, folder, resume, lambda progress: tell(title, progress), command)


class _NeverStarted(Exception):
    """A job was waiting when all were asked to end."""


def _run(job: Callable[..., Any], title: str, *arguments: Any) -> Any:
    if _stop.is_set():
        raise _NeverStarted
    _queue.put((title, STARTED))
    return job(title, *arguments)


def _lost(job: Future[Any]) -> bool:
    """Whether a job ended because a process did, its own or another one."""
    return not job.cancelled() and isinstance(job.exception(), BrokenProcessPool)


def tell(title: str, message: Any) -> bool:
    """In a worker: tell the parent something; True where the parent wants the job to end. Elsewhere nobody hears."""
    if _queue is None:
        return False
    if first():
        _queue.put((title, message))
    return _stop.is_set()


def on_devices(count: int, job: Callable[..., object], *arguments: Any) -> None:
    """In a worker: do `job(*arguments)`, in `count` processes that train together where it is more than one.

    Left to itself, Lightning would start them by running the program again, which is all of the study.
    RuntimeError where one of them fails.
    """
    if count == 1:
        job(*arguments)
        return
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        spawn(_one_of, (count, port, _queue, _stop, job, arguments), count)
    except ProcessRaisedException as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None


def _one_of(local_rank: int, count: int, port: int, messages: Any, stop: Any, job: Any, arguments: Any) -> None:
    together = {"LOCAL_RANK": local_rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in together.items()})
    _enter(messages, stop)
    job(*arguments)


def _enter(messages: Any, stop: Any) -> None:
    """What a worker process does first: leave Ctrl-C to its parent, end when told to, and not outlive it."""
    global _queue, _stop
    _queue, _stop = messages, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # Lightning would catch it, and the next job begin
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """What starts meanwhile has the environment of a worker."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is ignored, here and in what starts meanwhile; outside of the main thread it never arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
