"""Train a `Run` into a folder, and score the trained model."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normkit._util import write_whole
from normkit.bench import use_threads
from normkit_papers import results
from normkit_papers.singular_values import embedding_rows
from normkit_papers.tasks import TASKS
from normkit_papers.train import folder as folders
from normkit_papers.train import parallel
from normkit_papers.train.build import build_model
from normkit_papers.train.callback import Progress, RunCallback, checkpointing, to_average
from normkit_papers.train.config import Run
from normkit_papers.train.environment import environment
from normkit_papers.train.folder import checkpoints
from normkit_papers.train.lightning import Watch, make_trainer, run_trainer
from normkit_papers.train.source import source
from normkit_papers.train.task import Task
from normkit_papers.train.weights import check_fit, mean_weights, model_state, read_checkpoint, save_weights

# implementations of attention but cuDNN's, which plans for each new shape of a batch
ANY_SHAPE = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE,
]  # fmt: skip


class _Interrupted(Exception):
    """The run was interrupted outside of training."""


def train(
    run: Run,
    folder: str | Path,
    resume: bool = False,
    on_progress: Callable[[Any], object] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train a run into a folder, score the model on the test split, and write result.json.

    A run whose loss is not finite ends with status "diverged at step N" and has no scores.
    `tensorboard --logdir FOLDER` shows the curves while it trains.

    Args:
        run: What to train.
        folder: The run folder, empty unless `resume` is True. It is locked during the run.
        resume: Continue from the last checkpoint, if there is one. On a CPU the weights are the same, bit for bit, as
            without the interruption. Statistics that processes keep separately continue with those of rank 0. On one
            device a run that has ended is not trained again: its result is returned.
        on_progress: Called with a `Progress` now and then. If it returns True, the run ends with status "interrupted at
            step N".
        command: Command line to repeat the run, for the result.

    Returns:
        The content of result.json.

    Raises:
        ValueError: If a name is unknown, the folder has other content or another process writes into it, a checkpoint
            cannot be read, GPUs are missing, or a launcher started another number of processes than the run needs.
    """
    parallel.check_devices(run)
    folder = Path(folder)
    callback = RunCallback(run, folder, on_progress)

    def on_stage(stage: str) -> None:
        if on_progress is not None and on_progress(Progress(stage, callback.step, run.steps)):
            raise _Interrupted

    read_data = source(run, on_stage)
    with folders.locked(folder) if parallel.is_rank_zero() else contextlib.nullcontext():
        if parallel.is_rank_zero():
            folders.check_free(folder, run, resume)
        if resume:
            ended = results.ended(folder) if run.devices == 1 else None  # perhaps by another process
            if ended and not folders.differences(ended["run"], run):
                return ended
        with use_threads(run.threads), contextlib.nullcontext() if run.one_shape else sdpa_kernel(ANY_SHAPE):
            try:
                data = read_data()
            except _Interrupted:
                raise KeyboardInterrupt from None
            torch.manual_seed(run.seed)
            model = build_model(run.task, run.model, data.vocabularies)
            task = TASKS[run.task].load("module")(run, model, data)
            watch = _fit(task, callback, resume)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()  # metrics and norms would wait for processes that have ended
            if not parallel.is_rank_zero():
                raise SystemExit(0)
            return _finish(task, callback, watch, on_stage, command)


def _fit(task: Task, callback: RunCallback, resume: bool) -> Watch | None:
    """Train to the last step, to a divergence, or until an interrupt; return what recorded the norms."""
    from lightning.pytorch.loggers import TensorBoardLogger

    run, folder = task.settings, callback.folder
    checkpoint = next(reversed(checkpoints(folder)), None) if resume else None
    task.load_pretrained()
    if checkpoint is not None:
        folders.check_vocabularies(f"in {folder}", folders.read_vocabularies(folder), task.data.vocabularies)
        saved = read_checkpoint(checkpoint)
        check_fit(model_state(saved), task.model.state_dict(), checkpoint)
        task.start = saved["global_step"] * run.accumulate
    watch = None
    if run.record_every:
        every, log_every = (steps * run.accumulate for steps in (run.record_every, callback.log_every))
        rows = folder / "rows.csv"
        loss = "criterion" if task.criterion else ""
        watch = Watch(every, run.quantities, to=rows, keep=50_000, part="model", loss=loss, log_every=log_every)
    trainer = make_trainer(
        folder,
        max_steps=run.steps,
        accelerator=parallel.device_type(run.device),
        devices=run.devices,
        strategy=parallel.make_strategy(run),
        precision=run.precision,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip or None,
        callbacks=[*([watch] if watch else []), *task.callbacks(), callback, *checkpointing(run, folder)],
        logger=TensorBoardLogger(folder, name="", version="tensorboard", purge_step=task.start // run.accumulate),
    )
    if run.compile:
        task.model.compile(dynamic=not run.one_shape)
    if parallel.is_rank_zero():
        folders.write_run(folder, run, task.data.vocabularies)
    run_trainer(trainer, task, checkpoint)
    task.model._compiled_call_impl = None
    return watch


def _finish(
    task: Task, callback: RunCallback, watch: Watch | None, on_stage: Callable[[str], None], command: str
) -> dict[str, Any]:
    """Average, save and score the trained model, and write the result."""
    run, folder = callback.run, callback.folder
    averaged = to_average(run, folder) if callback.status == "done" and run.average else []
    if averaged:  # a run may end before its first checkpoint: then the last weights stay
        task.model.load_state_dict(mean_weights([model_state(read_checkpoint(path)) for path in averaged]))
    save_weights(task.model, folder / "model.safetensors")
    task.to(parallel.device_type(run.device))  # Lightning moved it to the CPU
    scores, status, started = {}, callback.status, time.perf_counter()
    if status == "done":
        try:
            if not callback.valid:
                callback.valid.append({"step": callback.step, **task.validate()})
            scores = task.score(on_stage)
            if watch is not None:
                watch.append(embedding_rows(task.model, callback.step))
        except _Interrupted:
            status = f"interrupted at step {callback.step}"  # after the last step, before the scores
    seconds = max(callback.seconds, 1e-9)
    result = {
        "schema": results.SCHEMA,
        "run": dataclasses.asdict(run),
        "command": command,
        "status": status,
        "where": environment(run.device, run.devices),
        "data": task.describe_data(),
        "averaged": len(averaged),
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "curve": callback.curve,
        "valid": callback.valid,
        "scores": scores,
        "speed": {"train_tokens_per_s": run.devices * callback.tokens / seconds},
        "fold": None,
        "seconds": {"train": callback.seconds, "score": time.perf_counter() - started},
    }
    for kind, lines in task.outputs.items():
        write_whole(folder / "outputs" / f"{kind}.txt", "".join(f"{line}\n" for line in lines).encode())
    results.write(folder, result)
    return result
