"""Train as a `Run` says, into a folder; load what such a folder holds."""

import contextlib
import dataclasses
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from normkit.files import write_whole
from normkit.lab.data.subwords import vocabulary
from normkit.lab.data.vocab import Vocab
from normkit.lab.report import results
from normkit.lab.tasks import TASKS
from normkit.lab.train.build import Vocabularies, build_model
from normkit.lab.train.config import Run
from normkit.lab.train.distributed_env import check_launched, first
from normkit.lab.train.environment import where
from normkit.lab.train.parallel import check_gpus, together
from normkit.lab.train.progress import Progress
from normkit.lab.train.source import source
from normkit.lab.train.utilization import utilization
from normkit.lab.train.weights import fits, load_weights, mean_weights, save_weights
from normkit.names import pick

if TYPE_CHECKING:
    from normkit.lab.train.callbacks import Journal
    from normkit.lab.train.task import Task

SCHEMA = 1
LEFT = ("checkpoints/*.ckpt", "outputs/*.txt", "model.safetensors", "result.json", "progress.json", "rows.csv")
"""What a run makes; of another one in its folder none may stay, or its weights would pass for this one's."""

FREE = ("name", "device", "threads", "workers")
"""What may change when a run is resumed: where it is made, not what it is."""


class Loaded(NamedTuple):
    """What a run folder holds: the settings, the trained model in evaluation mode, the vocabularies by name."""

    run: Run
    model: nn.Module
    vocabularies: Vocabularies


def train(
    run: Run,
    folder: str | Path,
    resume: bool = False,
    on_progress: Callable[[Any], object] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train as `run` says into `folder`, score the model on the test split, and return what result.json then holds.

    What another run left in the folder is replaced, but not before the data has been read and the model built. With
    `resume` the run goes on from its last checkpoint, to the same weights, bit for bit on a CPU, as without an
    interruption; from the start where there is none. Statistics that several processes keep each for itself go on as
    the first's; `sync=True` keeps them in common. `on_progress` is told of a `Progress` now and then; where it
    returns something true the run ends with status "interrupted at step N". A run whose loss is not finite ends with
    status "diverged at step N" and has no scores. `command` is kept in the result: what a person types to repeat it.

    ValueError where a name is not in its table, the run to resume is another one, a checkpoint cannot be read, GPUs
    are not there, or torchrun or SLURM started other processes than the run is for.
    """
    from normkit.lab.train.callbacks import Journal

    check_launched(run.devices, run.nodes)
    check_gpus(run)
    folder = Path(folder)
    spec = pick(TASKS, run.task, "task")
    journal = Journal(run, folder, on_progress)

    def tell(stage: str) -> None:
        if on_progress is not None and on_progress(Progress(stage, journal.step, run.steps)):
            raise _Interrupted

    make_data = source(run, tell)
    if resume:
        _check_same(folder, run)
    if run.threads:
        torch.set_num_threads(run.threads)
    try:
        data = make_data()
    except _Interrupted:
        raise KeyboardInterrupt from None
    torch.manual_seed(run.seed)
    task = spec.load("module")(run, build_model(run.task, run.model, data.vocabularies), data)
    _fit(task, journal, resume)
    if together():
        torch.distributed.destroy_process_group()  # else metrics and norms would wait for those that have ended
    if not first():
        raise SystemExit(0)  # the first process scores and writes

    averaged = journal.kept(run.average) if journal.status == "done" and run.average else []
    if averaged:  # a run may end before its first checkpoint: then the last weights stay
        _average(task.model, averaged)
    task.settle()
    if journal.status == "done" and not journal.valid:
        journal.valid.append({"step": journal.step, **task.look()})

    save_weights(task.model, folder / "model.safetensors")
    task.to("cuda" if run.device != "cpu" and torch.cuda.is_available() else "cpu")  # Lightning took it off
    scores, status, started = {}, journal.status, time.perf_counter()
    if status == "done":
        try:
            with _advice(run, folder):
                scores = task.score(tell)
            journal.record_end(task.model, scores)
        except _Interrupted:
            status = f"interrupted at step {journal.step}"  # all steps are done, scores are not
    result = {
        "schema": SCHEMA,
        "run": dataclasses.asdict(run),
        "command": command,
        "status": status,
        "where": where(run.device, run.devices * run.nodes),
        "data": task.facts(),
        "averaged": len(averaged),
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "curve": journal.curve,
        "valid": journal.valid,
        "scores": scores,
        "speed": {
            "train_tokens_per_s": run.devices * run.nodes * journal.tokens / max(journal.seconds, 1e-9),
            "train_words_per_s": run.devices * run.nodes * journal.words / max(journal.seconds, 1e-9),
        },
        "fold": None,
        "timing": None,
        "seconds": {"train": journal.seconds, "score": time.perf_counter() - started},
    }
    for kind, lines in task.outputs.items():
        write_whole(folder / "outputs" / f"{kind}.txt", "".join(f"{line}\n" for line in lines).encode())
    if run.static:  # a run for speed
        result["speed"] |= utilization(task.model, result["speed"]["train_tokens_per_s"] / run.devices / run.nodes)
    results.write(folder, result)
    return result


class _Interrupted(Exception):
    """Somebody asked a run to stop while it was being scored."""


def load(folder: str | Path) -> Loaded:
    """What a run folder holds; ValueError, naming what is missing or wrong, where it is not one."""
    folder = Path(folder)
    run, vocabularies = read_run(folder), _read_vocabularies(folder)
    model = build_model(run.task, run.model, vocabularies)
    load_weights(model, folder / "model.safetensors")
    return Loaded(run, model.eval(), vocabularies)


def save(folder: str | Path, loaded: Loaded) -> None:
    """Write a folder that `load` reads; ValueError where the settings do not describe the model."""
    run, model, vocabularies = loaded
    folder = Path(folder)
    write_whole(folder / "run.json", run.to_json().encode())
    _save_vocabularies(folder, vocabularies)
    save_weights(model, folder / "model.safetensors")
    load(folder)


def read_run(folder: Path) -> Run:
    """The settings in a run folder; ValueError where it is not one."""
    path = folder / "run.json"
    if not path.is_file():
        what = "there is no such folder" if not folder.is_dir() else "it has no run.json"
        raise ValueError(
            f"{folder} is no folder of a run: {what}; `normkit train` and `normkit demo` make such folders"
        )
    try:
        return Run.from_json(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_same(folder: Path, run: Run) -> None:
    """ValueError where the run in a folder, if there is one, has other settings."""
    if not (folder / "run.json").exists():
        return
    before, now = dataclasses.asdict(read_run(folder)), dataclasses.asdict(run)
    changed = [name for name in now if name not in FREE and now[name] != before[name]]
    if changed:
        raise ValueError(f"{folder} holds a run with another {', '.join(changed)}; resume with its own settings")


def _claim(journal: "Journal", vocabularies: Vocabularies, resume: bool) -> None:
    """Make the folder this run's: what another one left goes."""
    run, folder = journal.run, journal.folder
    if not first():
        return
    left = [] if resume else [path for pattern in LEFT for path in folder.glob(pattern)]
    if left:
        journal.on_progress(Progress("replacing what another run left", 0, run.steps))
    for path in left:
        path.unlink()
    write_whole(folder / "run.json", run.to_json().encode())
    _save_vocabularies(folder, vocabularies)


def _fit(task: "Task", journal: "Journal", resume: bool) -> None:
    """Run Lightning's loop to the end of the run, to its divergence, or to where it was asked to stop."""
    from normkit.lab.train.checkpoints import AtomicCheckpoints, checkpoints, model_state, read_checkpoint
    from normkit.lab.train.lit import lightning
    from normkit.lab.train.parallel import cluster, strategy, whole

    run = task.settings
    checkpoint = next(reversed(checkpoints(journal.folder)), None) if resume else None
    if checkpoint is not None:
        _same_vocabularies(journal.folder, task.data.vocabularies)
        saved = read_checkpoint(checkpoint)
        fits(model_state(saved), task.model.state_dict(), checkpoint)
        task.start = saved["global_step"] * run.accumulate
    with _quiet():
        trainer = lightning.Trainer(
            max_steps=run.steps,
            accelerator=run.device,
            devices=run.devices,
            num_nodes=run.nodes,
            strategy=strategy(run),
            precision=run.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=run.accumulate,
            gradient_clip_val=run.clip or None,
            callbacks=[journal],
            plugins=[AtomicCheckpoints(), *cluster()],
            default_root_dir=journal.folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if run.compile:
            task.model.compile(dynamic=not (run.static or TASKS[run.task].fixed_length))
        _claim(journal, task.data.vocabularies, resume)  # now that all is checked that can be
        with _advice(run, journal.folder):
            trainer.fit(task, ckpt_path=checkpoint, weights_only=True)
        task.model._compiled_call_impl = None
        if run.strategy == "fsdp2" and trainer.world_size > 1:
            task.model = whole(task.model, lambda: build_model(run.task, run.model, task.data.vocabularies))


@contextlib.contextmanager
def _advice(run: Run, folder: Path) -> Iterator[None]:
    """ValueError, saying what helps, where the GPU's memory is too small."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU's memory is too small for batches of {run.batch_tokens} tokens "
            f"({str(error).splitlines()[0]}); what is in {folder} is kept: --resume goes on from its last checkpoint "
            "on a larger GPU, or with --device cpu. A run of the same steps that needs less has half of batch_tokens "
            "and double accumulate, or precision=bf16-mixed, and another folder (--out)"
        ) from None


def _save_vocabularies(folder: Path, vocabularies: Vocabularies) -> None:
    plain = {name: vocab.plain() for name, vocab in vocabularies.items()}
    write_whole(folder / "vocab.json", json.dumps(plain, ensure_ascii=False).encode())


def _read_vocabularies(folder: Path) -> dict[str, Vocab]:
    try:
        texts = json.loads((folder / "vocab.json").read_text(encoding="utf8"))
        return {name: vocabulary(plain) for name, plain in texts.items()}
    except (OSError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / 'vocab.json'} cannot be read: {error}") from None


def _same_vocabularies(folder: Path, vocabularies: Vocabularies) -> None:
    """ValueError where the data has other words than the run had that is resumed."""
    before = _read_vocabularies(folder)
    for name, vocab in vocabularies.items():
        old, new = before[name].symbols if name in before else [], vocab.symbols
        if old != new:
            raise ValueError(
                f"the run in {folder} has {len(old):,} {name} words, the data now {len(new):,} or others; resume with "
                "the data and the vocabulary that it was trained with"
            )


def _average(model: nn.Module, paths: list[Path]) -> None:
    from normkit.lab.train.checkpoints import model_state, read_checkpoint

    model.load_state_dict(mean_weights([model_state(read_checkpoint(path)) for path in paths]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning without its advice, which speaks of choices that are made here."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
