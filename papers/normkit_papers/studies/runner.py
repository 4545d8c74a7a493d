"""Train runs in parallel with joblib: processes on this machine, or the workers of a Ray cluster.

A run that ended is kept, a run that was interrupted resumes, also after kill -9: the same command again continues.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from normkit._util import write_whole
from normkit_papers import results
from normkit_papers.studies import rows
from normkit_papers.studies.catalogue import lacking
from normkit_papers.studies.rows import FAILURE
from normkit_papers.study import Study, expand, seeded
from normkit_papers.train.config import Run
from normkit_papers.train.folder import Locked, differences

REFRESH = 0.5  # seconds between two readings of the notes
LOGGED = 60.0  # seconds between two lines for each run in training, where the output is no terminal
LOCAL_MEMORY = 100 * 2**20  # bytes that a local Ray reserves for results; ours are small
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",  # glibc would return every large tensor to the system
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "RAY_USAGE_STATS_ENABLED": "0",
}

Runs = Mapping[Path, Run]
"""Runs by their folder."""


def train_all(
    runs: Runs,
    command: str,
    processes: int = 1,
    ray: str | None = None,
    on_end: Callable[[Path, str], object] = lambda folder, status: None,
    console: Console | None = None,
) -> dict[Path, str]:
    """Train all runs in their order, in processes here or on a Ray cluster.

    All machines of a cluster must see the folders. `on_end` is called with folder and status of each run as it ends.

    Returns:
        The status of each run that ended: "done", "diverged at step N", "failed: ...", "left out: ...".
    """
    kinds: dict[tuple[Any, ...], dict[Path, Run]] = {}  # runs of equal needs are trained together
    for folder, run in runs.items():
        kinds.setdefault((run.device, run.devices, run.threads), {})[folder] = run
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    shared = Path(os.path.commonpath([folder.parent for folder in runs]))
    shared.mkdir(parents=True, exist_ok=True)
    with Display(console or Console(), len(runs), shared, on_end) as display:
        for kind in kinds.values():
            with _backend(next(iter(kind.values())), processes, ray) as jobs:
                calls = [joblib.delayed(train_one)(run, folder, command, display.notes) for folder, run in kind.items()]
                try:
                    joblib.Parallel(jobs, batch_size=1, pre_dispatch=jobs)(calls)  # pyright: ignore[reportArgumentType]
                except TerminatedWorkerError:
                    raise ValueError("a process was killed, as when memory runs out; the same command again continues, "
                                     "perhaps with fewer --processes") from None  # fmt: skip
    return {folder: display.ended[folder] for folder in runs if folder in display.ended}


def train_one(run: Run, folder: Path, command: str, notes: Path) -> None:
    """Train or resume a run in a worker, unless it has ended; its note has progress and status.

    A run that raises leaves failed.txt, and is tried again by the next command.
    """
    path, noted = notes / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json", 0.0

    def note(status: str | None, **shown: Any) -> None:
        about = {"folder": str(folder), "name": run.name, "status": status, "shown": shown}
        write_whole(path, json.dumps(about).encode())

    def on_progress(progress: Any) -> None:
        nonlocal noted
        if time.monotonic() - noted > REFRESH:
            noted = time.monotonic()
            note(None, **describe(progress))

    try:
        if not is_finished(folder, run):
            (folder / FAILURE).unlink(missing_ok=True)
            _on_devices(run, folder, command, on_progress)
        status = results.read(folder)["status"]
    except Locked as error:  # another command trains it
        status = f"left out: {error}"
    except Exception as error:
        status = f"failed: {' '.join(str(error).split()) or type(error).__name__}"[:300]
        write_whole(folder / FAILURE, f"{status}\n".encode())
    if status.startswith("interrupted"):  # by Ctrl-C, which ends this process too
        raise KeyboardInterrupt
    note(status)


def is_finished(folder: Path, run: Run) -> bool:
    """Check whether a folder holds this run's result: scores, or a divergence.

    Raises:
        ValueError: If the result is of a run with other settings.
    """
    if (result := results.ended(folder)) is None:
        return False
    if changed := differences(result["run"], run):
        raise ValueError(
            f"{folder} holds a run of other settings ({', '.join(changed)}); name another --out, or delete it"
        )
    return True


def _on_devices(run: Run, folder: Path, command: str, on_progress: Callable[[Any], None]) -> None:
    """Train in this process or, where Lightning would start the command again, in one a device."""
    if run.devices == 1:
        _train(run, folder, command, on_progress)
        return
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        spawn(_train_rank, (run, folder, command, port), run.devices)
    except ProcessRaisedException as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None


def _train_rank(rank: int, run: Run, folder: Path, command: str, port: int) -> None:
    variables = {"LOCAL_RANK": rank, "WORLD_SIZE": run.devices, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    _train(run, folder, command, None)


def _train(run: Run, folder: Path, command: str, on_progress: Callable[[Any], None] | None) -> None:
    from normkit_papers.train.run import train

    train(run, folder, resume=True, on_progress=on_progress, command=command)


@contextlib.contextmanager
def _backend(run: Run, processes: int, ray: str | None) -> Iterator[int]:
    """Choose joblib's backend for runs like `run`, and yield the number at the same time."""
    gpus, threads = 0 if run.device == "cpu" else run.devices, (run.threads or 1) * run.devices
    if ray is None:
        if run.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise ValueError("this scale needs a GPU, and none is here; --scale pocket needs none")
        with joblib.parallel_config("loky", inner_max_num_threads=run.threads):
            yield processes
        return
    import ray as cluster
    from ray.util.joblib import register_ray

    register_ray()
    local = {"include_dashboard": False, "object_store_memory": LOCAL_MEMORY} if ray == "local" else {}
    cluster.init(address=ray, log_to_driver=False, ignore_reinit_error=True, **local)
    have = cluster.cluster_resources()
    jobs = int(have.get("GPU", 0) // gpus if gpus else have["CPU"] // threads)
    if jobs < 2:  # joblib would train in this process
        raise ValueError(f"this Ray cluster has {have}, not enough for two runs of {gpus} GPU and {threads} CPU each")
    with joblib.parallel_config("ray", n_jobs=jobs, ray_remote_args={"num_cpus": threads, "num_gpus": gpus}):
        yield jobs


def describe(progress: Any) -> dict[str, Any]:
    """Reduce the progress of a run to what is shown: completed, total, and a text.

    >>> from normkit_papers.train.callback import Progress
    >>> describe(Progress("training", 5, 10, 1.25))
    {'completed': 5, 'total': 10, 'state': 'loss 1.250'}
    """
    training = progress.stage == "training"
    state = f"loss {progress.loss:.3f}" if training else progress.stage
    return {"completed": progress.step, "total": progress.steps, "state": state}


def progress_bars(console: Console) -> Progress:
    """Create the display of runs in training, each with a bar and a text, `state`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
    more = (TextColumn("{task.fields[state]}", markup=False), TimeRemainingColumn())
    return Progress(*columns, *more, console=console, disable=not console.is_terminal)


class Display:
    """One progress display of many runs: a bar for all, and one for each run in training.

    Workers write notes into files in `notes`, which a thread follows: so it is the same for processes, Ray, and this
    process. `ended` has the status of each run that has ended.
    """

    def __init__(self, console: Console, total: int, shared: Path, on_end: Callable[[Path, str], object]):
        self.console, self.on_end = console, on_end
        self._folder = tempfile.TemporaryDirectory(prefix=".progress-", dir=shared)
        self.notes, self.ended = Path(self._folder.name), dict[Path, str]()
        self._bars = progress_bars(console)
        self._rows: dict[Path, TaskID] = {}  # of the notes
        self._logged = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_following, daemon=True)
        self._all = self._bars.add_task("runs", total=total, state="")

    def __enter__(self) -> "Display":
        self._bars.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self.follow()
        self._bars.stop()
        self._folder.cleanup()

    def _keep_following(self) -> None:
        while not self._closed.wait(REFRESH):
            self.follow()

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def follow(self) -> None:
        """Show the notes that workers have written since the last time."""
        with self._lock:
            log = not self.console.is_terminal and time.monotonic() - self._logged > LOGGED
            self._logged = time.monotonic() if log else self._logged
            for file in sorted(self.notes.glob("*.json")):
                note = json.loads(file.read_bytes())
                if file not in self._rows:
                    self._rows[file] = self._bars.add_task(note["name"], state="")
                self._bars.update(self._rows[file], **(shown := note["shown"]))
                if log and shown:
                    self._print(f"{note['name']}: {shown['completed']} of {shown['total']}, {shown['state']}")
                if note["status"] is not None:
                    file.unlink()
                    self._bars.remove_task(self._rows.pop(file))
                    self._bars.advance(self._all)
                    folder, status = Path(note["folder"]), note["status"]
                    self._print(f"{note['name']}: {status}")
                    self.ended[folder] = status
                    self.on_end(folder, status)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Runs that are left to train, the number that have ended, and why others are left out.

    Runs that several studies share stand once.
    """

    todo: dict[Path, Run]
    finished: int
    missing: dict[str, str]


def plan(studies: Sequence[Study], scale: str, out: Path, seeds: int | None = None, only: Sequence[str] = ()) -> Plan:
    """List the runs that are left to train, seed by seed: all rows of a table appear early.

    `seeds` is the number of runs of each cell, None for that of the study; `only` has rows to train, as for `expand`.

    Raises:
        ValueError: If a folder holds a run with other settings.
    """
    counts = {study.id: seeds or (study.seeds if scale == "pocket" else 1) for study in studies}
    runs: dict[Path, Run] = {}
    for seed in range(max(counts.values(), default=0)):
        for study in studies:
            if seed < counts[study.id]:
                runs |= dict(seeded(cell, out, seed) for cell in expand(study, scale, only))
    todo = {folder: run for folder, run in runs.items() if not is_finished(folder, run)}
    missing = {
        run.data: why
        for run in {run.data: run for run in todo.values()}.values()
        if (why := lacking(run, scale == "paper"))
    }
    kept = {folder: run for folder, run in todo.items() if run.data not in missing}
    return Plan(kept, len(runs) - len(todo), missing)


def run_studies(
    studies: Sequence[Study], scale: str, out: Path, chosen: Plan, command: str, **how: Any
) -> dict[Path, str]:
    """Train the runs of a plan, and return their status; `how` are further arguments of `train_all`.

    After each run, the rows of the studies that show it are written into `out/STUDY.csv`.
    """
    shown_by = {study.id: {out / cell.folder for cell in expand(study, scale)} for study in studies}

    def on_end(folder: Path, status: str) -> None:
        for study in studies:
            if folder.parent in shown_by[study.id]:
                rows.append(out / f"{study.id}.csv", rows.collect(study, scale, out))

    try:
        return train_all(chosen.todo, command, on_end=on_end, **how) if chosen.todo else {}
    finally:
        for study in studies:
            if any(column.metric.startswith("cka") for column in study.columns):
                from normkit_papers.studies.similarity import add_similarity

                add_similarity(study, scale, out)
            if made := rows.collect(study, scale, out):
                rows.append(out / f"{study.id}.csv", made)
