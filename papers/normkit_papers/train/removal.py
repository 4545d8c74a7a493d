"""Remove the norms of a trained model: convert, fit, train a little, fold, compare."""

import copy
import dataclasses
import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit._util import align, write_whole
from normkit.models import calibrate, convert, find, fit_norms
from normkit.norms import StatNorm, make, parse
from normkit_papers.train.distill import Distillation
from normkit_papers.train.environment import environment
from normkit_papers.train.fit import fit
from normkit_papers.train.folder import locked
from normkit_papers.train.progress import Progress
from normkit_papers.train.removable import RemovableRun, RemovableText, open_removable

FITTED = 8  # batches that gains and biases are fitted to
CALIBRATED = 100  # batches that statistics are taken of in the end
STATE = ".removal"  # folder of checkpoints inside the output folder
FILE = "removal.json"


@dataclasses.dataclass(frozen=True)
class Removal:
    """Settings of a removal.

    Attributes:
        steps: Training steps.
        to: Spec of the offline norm that takes the place of each norm, and is folded.
        loss: "outputs": those of the original, and its inner activations; "task": the loss of a run's task.
        lr: Highest learning rate; None for a third of the run's, or 3e-4.
        text: Text for a Hugging Face model: a file, or the name of a corpus.
        statistics: Statistics of the new norms while training: "frozen"; "batches", those of each batch, calibrated at
            the end; None for "batches" with the loss of a task, else "frozen".
        seed: Seed.
        unfolded: Also write the trained model with its offline norms, to fold it with other options.
    """

    steps: int
    to: str = "un(warmup=0)"
    loss: Literal["outputs", "task"] = "outputs"
    lr: float | None = None
    text: str | None = None
    statistics: Literal["frozen", "batches"] | None = None
    seed: int = 0
    unfolded: bool = False

    @property
    def frozen(self) -> bool:
        """True if training keeps the statistics of the new norms."""
        return (self.statistics or ("batches" if self.loss == "task" else "frozen")) == "frozen"


@dataclasses.dataclass(frozen=True)
class Removed:
    """Result of a removal; prints as a table.

    Attributes:
        quality: Scores by stage: "original", "fitted" (not trained), "without norms" (trained and folded), and with
            the loss of the task "original, trained likewise". Trained on its own outputs the original stays as it is.
        tail: Mean, 99.9th percentile and maximum over single tokens, by stage.
        tail_of: What these are of.
        fold: The report of folding, as text.
    """

    quality: dict[str, dict[str, float]]
    tail: dict[str, dict[str, float]]
    tail_of: str
    fold: str

    def __str__(self) -> str:
        scores = list(self.quality["original"])
        tails = ("mean", "99.9 %", "maximum")
        rows = [["", *scores, *tails]]
        for stage, quality in self.quality.items():
            tail = self.tail[stage]
            rows.append([stage, *(f"{quality[score]:.4g}" for score in scores), *(f"{tail[t]:.4g}" for t in tails)])
        table = align(rows, right=range(1, len(rows[0])), heads=1)
        return f"{self.fold}\n\n{table}\n{', '.join(tails)}: {self.tail_of}"


def remove_norms(
    folder: Path | str,
    out: Path | str,
    settings: Removal,
    *,
    resume: bool = False,
    on_progress: Callable[[str, Progress], object] | None = None,
) -> Removed:
    """Remove the norms of the model in a folder, and write the folded model to another folder.

    Args:
        folder: A run, or a Hugging Face model with safetensors and a tokenizer.
        out: Folder for the model without norms; `removal.json` in it has the report, `unfolded` the other model.
        settings: What to do.
        resume: Continue an interrupted removal with the same settings.
        on_progress: Called with the stage and its `Progress`; if it returns True, the removal stops and can be resumed.

    Raises:
        ValueError: If an argument is wrong, data is missing, `out` holds a finished removal, an interrupted one
            without `resume` or none with it, or the loss is not finite.
        KeyboardInterrupt: If `on_progress` stopped it.
    """
    folder, out = Path(folder), Path(out)
    subject = _open(folder, out, settings)
    lr = subject.lr if settings.lr is None else settings.lr
    with locked(out):
        state = out / STATE
        _claim(state, {"folder": str(folder.resolve()), **dataclasses.asdict(settings)}, resume)
        torch.manual_seed(settings.seed)
        original = subject.model.eval()
        measured = state / "measured.json"
        kept: dict[str, Any] = {"quality": {}, "tail": {}}
        if measured.is_file():
            kept = json.loads(measured.read_text(encoding="utf8"))

        def show(stage: str) -> None:
            if on_progress is not None and on_progress("without norms", Progress(stage, 0, settings.steps)):
                raise KeyboardInterrupt

        def measure(stage: str, model: nn.Module) -> None:
            if stage not in kept["quality"]:
                show(f"measuring: {stage}")
                kept["quality"][stage] = subject.quality(model)
                kept["tail_of"], losses = subject.tail(model)
                kept["tail"][stage] = summarize(losses)
                write_whole(measured, json.dumps(kept).encode())

        def train(stage: str, model: nn.Module) -> None:
            loss: Any = Distillation(original, subject.outputs, sites)
            if isinstance(subject, RemovableRun) and settings.loss == "task":
                loss = subject.loss
            begin, models = FITTED + settings.seed * 7919, (model, original)
            fit(
                model, loss, lambda start: subject.batches(begin + start, fresh=not start), steps=settings.steps, lr=lr,
                dropout=settings.loss == "task", frozen=settings.frozen, checkpoint=_checkpoint(state, stage),
                carried=(lambda: subject.carried(models), lambda tensors: subject.carry(models, tensors)),
                on_progress=on_progress and functools.partial(on_progress, stage),
            )  # fmt: skip

        first = [batch for batch, _ in zip(subject.batches(0), range(FITTED), strict=False)]
        model = convert(subject.student(first), settings.to, mask_from=subject.mask_from)
        sites = [name for name, module in model.named_modules() if isinstance(module, StatNorm)]
        measure("original", original)
        if not _checkpoint(state, "without norms").exists():
            show("fitting")
            fit_norms(model, original, first, forward=subject.forward, inplace=True)
            measure("fitted", model)
        train("without norms", model)
        if not settings.frozen:
            show("calibrating")
            calibrate(model, itertools.islice(subject.batches(0), CALIBRATED), forward=subject.forward, inplace=True)
        show("folding")
        folded, report = subject.fold_and_save(model, out)
        if settings.unfolded:
            subject.save(model, out / "unfolded")
        measure("without norms", folded)
        if settings.loss == "task":
            likewise = copy.deepcopy(original)
            train("original, trained likewise", likewise)
            measure("original, trained likewise", likewise)
        removed = Removed(**kept, fold=str(report))
        facts = {"settings": dataclasses.asdict(settings), **dataclasses.asdict(removed), "where": environment("cpu")}
        write_whole(out / FILE, json.dumps(facts, indent=1).encode())
        shutil.rmtree(state)
    return removed


def _open(folder: Path, out: Path, settings: Removal) -> RemovableRun | RemovableText:
    """Return the model of a folder, after checking all arguments of a removal."""
    if settings.steps < 1:
        raise ValueError(f"steps must be at least 1; got {settings.steps}")
    if settings.lr is not None and not 0 < settings.lr < math.inf:
        raise ValueError(f"lr must be above 0 and finite; got {settings.lr:g}")
    parse(settings.to)
    if out.resolve() == folder.resolve():
        raise ValueError(f"{out} is the model itself, which is kept; name another folder")
    if (out / FILE).is_file():
        raise ValueError(f"{out} holds a finished removal ({FILE}); name another folder, or delete it")
    if (out / "unfolded").exists() and not (out / STATE).exists():
        raise ValueError(f"{out} holds another model ({out / 'unfolded'}); name another folder, or delete it")
    subject = open_removable(folder, settings.text)
    if settings.loss == "task" and not isinstance(subject, RemovableRun):
        raise ValueError("--loss task needs a run; a Hugging Face model is trained on the outputs of the original")
    found = list(find(subject.model).values())
    if found and all(parse(norm.kind)[0] == "nonorm" for norm in found):
        raise ValueError(f"{folder} has no norms left to remove")
    if found and not (isinstance(new := make(settings.to, found[0].dim), StatNorm) and new.offline):
        raise ValueError(f"{settings.to} computes statistics at inference, too; take un, mabn or power(groups=0)")
    return subject


def _checkpoint(state: Path, stage: str) -> Path:
    return state / f"{stage.replace(' ', '-')}.ckpt"


def summarize(values: Tensor) -> dict[str, float]:
    """Return mean, 99.9th percentile and maximum."""
    ordered = values.double().sort().values
    last = ordered[int(0.999 * (len(ordered) - 1))]
    return {"mean": float(values.double().mean()), "99.9 %": float(last), "maximum": float(ordered[-1])}


def _claim(state: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings, or check that they are those of the interrupted removal."""
    path = state / "settings.json"
    if resume and path.is_file():
        before = json.loads(path.read_text(encoding="utf8"))
        changed = [f"{key} ({before.get(key)}, not {now})" for key, now in settings.items() if now != before.get(key)]
        if changed:
            raise ValueError(f"{state.parent} holds an interrupted removal with another {', '.join(changed)}")
        return
    if path.is_file():
        raise ValueError(f"{state.parent} holds an interrupted removal; continue it with --resume, or delete it")
    if resume:
        raise ValueError(f"{state.parent} holds no interrupted removal to resume; leave out --resume")
    write_whole(path, json.dumps(settings).encode())
