"""Run jobs on a Ray cluster, or on a local Ray, with the interface of `Workers`."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from normkit_papers.studies.workers import ENVIRONMENT, RETRIES, worker_environment
from normkit_papers.train.config import Run

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
LOCAL_MEMORY = 100 * 2**20  # bytes that a local Ray reserves for results; ours are small


class RayWorkers:
    """Jobs as Ray tasks.

    Use it as `with RayWorkers("local") as workers: workers.submit(title, job, run, ...)`. Each job requests the threads
    of its run, and its GPUs unless the run is for the CPU. If a worker is lost, Ray starts the job again elsewhere; it
    resumes from its last checkpoint if all machines can read the run's folder.
    """

    def __init__(self, address: str = "local", cores: int | None = None):
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import ray

        _check_reachable(address)
        self._ray, self._jobs, self._stopped = ray, dict[Any, str](), False
        options: dict[str, Any] = {"runtime_env": {"env_vars": ENVIRONMENT}}
        if address == "local":  # its workers inherit the environment that it is started in
            options = {"num_cpus": cores, "object_store_memory": LOCAL_MEMORY, "include_dashboard": False}
        try:
            with worker_environment():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}") from None

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def submit(self, title: str, job: Callable[..., Any], *arguments: Any) -> None:
        """Start `job(title, *arguments)` on a worker; the first argument is the run."""
        run: Run = arguments[0]
        needs = {"CPU": run.devices * (run.threads or 1), "GPU": 0 if run.device == "cpu" else run.devices}
        resources = self._ray.cluster_resources()
        for kind, count in needs.items():
            if count > resources.get(kind, 0):
                raise ValueError(f"{title} needs {count} {kind}; this Ray cluster has {resources.get(kind, 0):g}")
        task = self._ray.remote(job).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=RETRIES, retry_exceptions=False
        )
        self._jobs[task.remote(title, *arguments)] = title

    def ended(self) -> Iterator[tuple[str, Any]]:
        """Yield title and outcome of each job as it ends; cancelled jobs are left out."""
        while self._jobs:
            done, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=1.0)
            for job in done:
                title = self._jobs.pop(job)
                try:
                    outcome = self._ray.get(job)
                except self._ray.exceptions.RayError as error:
                    if self._stopped or isinstance(error, self._ray.exceptions.TaskCancelledError):
                        continue
                    outcome = getattr(error, "cause", None) or error
                yield title, outcome

    def stop(self) -> None:
        """Cancel all jobs; running ones keep their last checkpoint."""
        self._stopped = True
        for job in self._jobs:
            self._ray.cancel(job)


def _check_reachable(address: str) -> None:
    """Raise ValueError if HOST:PORT refuses connections; Ray itself would wait for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from None
