"""Remove the norms of a run's model with `normkit.remove_norms`, on the run's own data."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit._util import write_whole
from normkit.fold import Report
from normkit.removal import Removal, remove_norms
from normkit.removal.distill import train
from normkit.removal.folders import costs_csv
from normkit.removal.state import check_out, claimed
from normkit_papers.data.vocab import PAD
from normkit_papers.tasks import TASKS
from normkit_papers.train.environment import environment
from normkit_papers.train.fold_run import fold_run
from normkit_papers.train.folder import Loaded, load, locked, save
from normkit_papers.train.source import open_task

FILE, COSTS = "removal.json", "costs.csv"
SCORED = 16  # validation batches on which a budget is measured
FIRST = 100_000  # number of the first batch: others than those that training began with


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a removal.

    Attributes:
        steps: Training steps; None for 300.
        budget: Train nothing: remove the norms that raise the validation loss by at most this together, in nats.
        loss: "outputs": those of the original, and what its norms return; "task": the loss of the run's task.
        to: Spec of the norm that is folded.
        statistics: Statistics of the new norms in training; None for "batches" with the task's loss, else "frozen".
        lr: Highest learning rate; None for a third of the run's.
        seed: Seed of the order of batches and of dropout.
    """

    steps: int | None = None
    budget: float | None = None
    loss: Literal["outputs", "task"] = "outputs"
    to: str = "un(warmup=0)"
    statistics: Literal["frozen", "batches"] | None = None
    lr: float | None = None
    seed: int = 0


def remove_norms_of_run(
    folder: Path,
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    on_progress: Callable[[str, int, int, float], object] | None = None,
) -> tuple[Removal, dict[str, float]]:
    """Remove the norms of a run, and write the folded run to another folder.

    A resumed training continues exactly, but a model with memory begins with an empty one.

    Args:
        folder: Folder of the run. Its data must be here.
        out: Folder for the run without norms.
        settings: What to do.
        resume: Continue an interrupted removal with the same settings.
        on_progress: Called as `on_progress(stage, done, of, seconds left)`.

    Returns:
        The report, and the run's metric on the test split by stage; with a budget, the validation loss. With the loss
        of the task one stage is the original, trained as long on the same batches.
    """
    if settings.budget is not None and settings.lr is not None:
        raise ValueError("budget trains nothing; leave out lr")
    check_out(folder, out, resume)
    loaded = load(folder)
    run, model, vocabularies = loaded
    if TASKS[run.task].part:
        raise ValueError(f"{folder} is a run of task {run.task}; its norms cannot be removed by this command")
    task, metric, lr = open_task(loaded), TASKS[run.task].metrics[0], settings.lr or run.lr / 3
    name, better = ("validation loss", -1) if settings.budget is not None else (metric.name, metric.better)
    valid = task.validation_batches()[:SCORED] if settings.budget is not None else []
    folded_runs: list[Loaded] = []

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(task.batches(FIRST + settings.seed * 7919)):
            yield batch if number else batch._replace(fresh=True)

    def mask(batch: Any) -> Tensor | None:
        return batch.tensors[-1] != PAD if "source" in vocabularies else None

    def loss(model: nn.Module, batch: Any) -> Tensor:
        task.model = model
        return task.loss(batch, run.label_smoothing)

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        task.model = model
        return task.mean_loss(valid) if valid else -better * task.score_test()[metric.key]

    def fold(trained: nn.Module) -> tuple[nn.Module, Report]:
        folded, report = fold_run(Loaded(run, trained, vocabularies))
        folded_runs.append(folded)
        return folded.model, report

    by_labels = settings.loss == "task"
    with locked(out), claimed(folder, out, dataclasses.asdict(settings), resume) as checkpoint:
        _, removal = remove_norms(
            model, batches(), steps=settings.steps, budget=settings.budget, forward=task.forward_norms, logits=True,
            mask=mask, loss=loss if by_labels else None, score=score, unit=name if better < 0 else f"-{name}",
            to=settings.to, lr=lr, statistics=settings.statistics, fold=fold, seed=settings.seed,
            checkpoint=checkpoint, on_progress=on_progress,
        )  # fmt: skip
        scores = {stage: -better * value for stage, value in removal.scores.items()}
        if by_labels:
            likewise = copy.deepcopy(model)
            train(
                likewise, loss, batches(), steps=removal.steps, lr=lr, dropout=True, frozen=False,
                on_step=lambda step, _: on_progress and on_progress("training the original, step", step, removal.steps,
                                                                    float("nan")),
            )  # fmt: skip
            scores["original, trained likewise"] = -better * score(likewise)
        save(out, folded_runs[0])
        if removal.costs:
            write_whole(out / COSTS, costs_csv(removal).encode())
        kept = {"settings": dataclasses.asdict(settings), name: scores, "fold": str(removal.fold)}
        write_whole(out / FILE, json.dumps({**kept, "where": environment("cpu")}, indent=1).encode())
    return removal, scores
