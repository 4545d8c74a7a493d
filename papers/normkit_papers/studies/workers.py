"""Run jobs in parallel processes that report their progress and stop on request."""

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

from normkit_papers.train.config import Run
from normkit_papers.train.distributed_env import is_rank_zero
from normkit_papers.train.progress import Progress

RETRIES = 3  # how often a job is started again after its process was killed
STARTED = "started"  # first message of a job
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",  # glibc would return every large tensor to the system
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "SLURM_JOB_NAME": "interactive",  # Lightning: these processes are not tasks of SLURM
    "SLURM_PROCID": "0",
}

_queue: Any = None  # of this worker process, set by _enter
_stop: Any = None


class Workers:
    """Processes for jobs.

    Use it as `with Workers(2, on_message) as workers: workers.submit(title, job, ...)`. If a process is killed, as when
    memory runs out, the pool is lost: all jobs that were running start again in new processes, `RETRIES` times at most,
    because the killed job cannot be identified.

    Args:
        count: Number of processes.
        on_message: Called with title and message for what jobs pass to `send`, while `ended` iterates.
    """

    def __init__(self, count: int, on_message: Callable[[str, Any], object]):
        self.count, self.on_message = count, on_message
        self._jobs: dict[Future[Any], tuple[Any, ...]] = {}
        self._losses: Counter[str] = Counter()
        self._stopped = False
        self._open()

    def _open(self) -> None:
        context = multiprocessing.get_context("spawn")  # a killed process may leave a lock of these locked
        self._messages, self._stop, self._running = context.SimpleQueue(), context.Event(), set[str]()
        self._pool = ProcessPoolExecutor(self.count, context, _enter, (self._messages, self._stop))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        try:
            for _ in self.ended():  # reads their messages: a full pipe would block them
                pass
            self._pool.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:  # the second Ctrl-C
            for process in multiprocessing.active_children():
                process.terminate()
            raise

    def submit(self, title: str, job: Callable[..., Any], *arguments: Any) -> None:
        """Run `job(title, *arguments)` in a worker; the job must be a function of a module."""
        with worker_environment(), _handling(signal.SIG_IGN):  # processes start at the first submit, and inherit both
            self._jobs[self._pool.submit(_run, job, title, *arguments)] = (title, job, *arguments)

    def stop(self) -> None:
        """Request that running jobs end, and cancel the others."""
        self._stopped = True
        self._stop.set()
        for job in self._jobs:
            job.cancel()

    def ended(self) -> Iterator[tuple[str, Any]]:
        """Yield title and outcome of each job as it ends.

        The outcome is the return value, or the exception that ended the job. Jobs that were cancelled before they
        started are left out.
        """
        while self._jobs:
            self._read_messages()
            done, _ = concurrent.futures.wait(self._jobs, 0.2, concurrent.futures.FIRST_COMPLETED)
            if any(map(_lost, done)):
                self._pool.shutdown()  # waits until all jobs and processes have ended
                done = list(self._jobs)
                self._read_messages()
                titles = {title for title, *_ in self._jobs.values()}
                self._losses.update(titles & self._running or titles)
                self._open()
            for job in done:
                title, *rest = self._jobs.pop(job)
                self._read_messages()
                self._running.discard(title)
                if job.cancelled() or isinstance(job.exception(), _NeverStarted) or (_lost(job) and self._stopped):
                    continue
                if not _lost(job):
                    yield title, job.exception() or job.result()
                elif self._losses[title] > RETRIES:
                    count = self._losses[title]
                    reason = f"its process, or one beside it, was killed {count} times, as when memory runs out"
                    yield title, RuntimeError(f"{reason}; try fewer processes at a time")
                else:
                    self.on_message(title, Progress("a process was killed, starting again", 0, 1))
                    self.submit(title, *rest)

    def _read_messages(self) -> None:
        while not self._messages.empty():
            with interrupted_after():
                title, message = self._messages.get()
                if message == STARTED:
                    self._running.add(title)
                else:
                    self.on_message(title, message)


def train_job(title: str, run: Run, folder: Path, command: str, resume: bool = False) -> dict[str, Any]:
    """Train a run in a worker, or resume it, and send its progress."""
    from normkit_papers.train.run import train

    return train(run, folder, resume, lambda progress: send(title, progress), command)


class _NeverStarted(Exception):
    """A job was waiting when `stop` was called."""


def _run(job: Callable[..., Any], title: str, *arguments: Any) -> Any:
    if _stop.is_set():
        raise _NeverStarted
    _queue.put((title, STARTED))
    return job(title, *arguments)


def _lost(job: Future[Any]) -> bool:
    """Check whether a job ended because a process was killed, its own or another."""
    return not job.cancelled() and isinstance(job.exception(), BrokenProcessPool)


def send(title: str, message: Any) -> bool:
    """Send a message from a worker to its parent; outside of a worker, do nothing.

    Returns:
        True if the parent has requested that the job stop.
    """
    if _queue is None:
        return False
    if is_rank_zero():
        _queue.put((title, message))
    return _stop.is_set()


def on_devices(count: int, job: Callable[..., object], *arguments: Any) -> None:
    """Run `job(*arguments)` in a worker, or in `count` processes that train together.

    Lightning would start these processes by running the program again, which would run the whole study.

    Raises:
        RuntimeError: If one of the processes fails.
    """
    if count == 1:
        job(*arguments)
        return
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        spawn(_run_rank, (count, port, _queue, _stop, job, arguments), count)
    except ProcessRaisedException as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None


def _run_rank(local_rank: int, count: int, port: int, messages: Any, stop: Any, job: Any, arguments: Any) -> None:
    variables = {"LOCAL_RANK": local_rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    _enter(messages, stop)
    job(*arguments)


def _enter(messages: Any, stop: Any) -> None:
    """Set up a worker process: ignore Ctrl-C, end on SIGTERM and with the parent."""
    global _queue, _stop
    _queue, _stop = messages, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # Lightning would catch it, and the next job begin
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def worker_environment() -> Iterator[None]:
    """Set the environment variables of a worker for processes that start meanwhile."""
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
def interrupted_after() -> Iterator[None]:
    """Receive Ctrl-C after the block.

    A console of rich that is interrupted while it prints may print nothing more, and half a message cannot be read.
    """
    received: list[int] = []
    try:
        with _handling(lambda number, _: received.append(number)):
            yield
    finally:
        if received:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C inside the block; it reaches the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
