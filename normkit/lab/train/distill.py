"""Train a model towards the outputs of another, or on labels, in a resumable loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.lab.train.checkpoints import read_checkpoint, write_checkpoint
from normkit.lab.train.progress import Progress
from normkit.norms import Norm

CLIP = 1.0  # largest norm of a gradient
BETAS = (0.9, 0.98)  # momentums of AdamW


class Outputs(NamedTuple):
    """Outputs of a model for a batch.

    Attributes:
        values: Logits or vectors, `[..., channels]`.
        real: True for real tokens, in the shape of `values` without channels; None for all.
        logits: The values are logits; else vectors, whose mean over each sequence counts in the loss as well.
    """

    values: Tensor
    real: Tensor | None
    logits: bool


class Distillation(NamedTuple):
    """Loss of a model against a teacher: outputs and inner activations, without labels.

    Attributes:
        teacher: The original model.
        outputs: Called as `outputs(model, batch)`.
        sites: Names of the modules, in both models, whose outputs count as inner activations.
    """

    teacher: nn.Module
    outputs: Callable[[nn.Module, Any], Outputs]
    sites: Sequence[str]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        with torch.no_grad(), captured(self.teacher, self.sites) as wanted:
            theirs = self.outputs(self.teacher, batch)
        with captured(model, self.sites) as found:
            mine = self.outputs(model, batch)
        inner = [relative_error(x, y, mask) for (x, mask), (y, _) in zip(found, wanted, strict=True)]
        total = distance(mine, theirs).mean() + torch.stack(inner).mean()
        if mine.logits:
            return total
        return total + 3 * (1 - F.cosine_similarity(pooled(mine, theirs.real), pooled(theirs, theirs.real))).mean()


def distance(mine: Outputs, theirs: Outputs) -> Tensor:
    """Return the distance of each real token's output from the original's, `[tokens]`.

    For logits the Kullback-Leibler divergence in nats, for vectors 1 - cosine.
    """
    x, y = (each.values.float() for each in (mine, theirs))
    x, y = (each.flatten(0, -2) if theirs.real is None else each[theirs.real] for each in (x, y))
    if theirs.logits:
        return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return 1 - F.cosine_similarity(x, y, dim=-1)


def pooled(outputs: Outputs, real: Tensor | None) -> Tensor:
    """Return the mean over the real tokens of each sequence, `[batch, channels]`."""
    values = outputs.values.float()
    weight = torch.ones_like(values[..., :1]) if real is None else real[..., None].float()
    return (values * weight).sum(1) / weight.sum(1)


@contextmanager
def captured(model: nn.Module, sites: Sequence[str]) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Collect, inside the block, outputs of modules with the masks that they get."""
    found: list[tuple[Tensor, Tensor | None]] = []

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Tensor) -> None:
        found.append((y, kwargs.get("mask", args[1] if len(args) > 1 else None)))

    with ExitStack() as hooks:
        for name in sites:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(keep, with_kwargs=True))
        yield found


def relative_error(x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared error over real tokens, relative to the variance of `y`."""
    x, y = x.float(), y.float()
    x, y = (x, y) if mask is None else (x[mask], y[mask])
    return F.mse_loss(x, y) / y.var()


def fit(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int], Iterator[Any]],
    *,
    steps: int,
    lr: float,
    dropout: bool = False,
    frozen: bool = True,
    checkpoint: Path | None = None,
    carried: tuple[Callable[[], Any], Callable[[Any], object]] = (list, list),
    every: int = 100,
    on_progress: Callable[[Progress], object] | None = None,
) -> None:
    """Train a model in place.

    AdamW, a short warm-up, then a cosine to zero; gradients are clipped. A checkpoint that exists is resumed.

    Args:
        model: The model; it is in evaluation mode afterwards.
        loss: Called as `loss(model, batch)`.
        batches: Returns the batches from a given number on, which depend on nothing else.
        steps: Number of steps.
        lr: Highest learning rate.
        dropout: Train with the model's dropout.
        frozen: Keep the statistics of norms: they train as they will be at inference, and cannot drift.
        checkpoint: File to write every `every` steps and on interrupt; removed by the caller.
        carried: Functions that return and restore the state that models carry from batch to batch, for the checkpoint.
        every: Steps between checkpoints.
        on_progress: Called at each step; if it returns True, training stops after writing the checkpoint.

    Raises:
        ValueError: If the loss is not finite, or the checkpoint is of another model.
        KeyboardInterrupt: If `on_progress` stopped it.
    """
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, Norm):
            module.train(not frozen)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr, betas=BETAS, fused=True,
    )  # fmt: skip
    warmup = min(100, steps // 10 + 1)
    start = 0
    if checkpoint is not None and checkpoint.exists():
        start, state = _resume(checkpoint, model, optimizer)
        carried[1](state)
    for step, batch in zip(range(start, steps), batches(start), strict=False):
        torch.manual_seed(step)  # for dropout, so that a resumed run is the same
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        value = loss(model, batch)
        if not value.isfinite():
            raise ValueError(f"the loss is {float(value.detach())} at step {step + 1}; lower lr={lr:g}")
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        stopped = on_progress is not None and on_progress(Progress("training", step + 1, steps, float(value.detach())))
        if checkpoint is not None and (stopped or (step + 1) % every == 0) and step + 1 < steps:
            state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_checkpoint(checkpoint, state | {"step": step + 1, "carried": carried[0]()})
        if stopped:
            raise KeyboardInterrupt
    model.eval()


def _resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, Any]:
    """Load a checkpoint into model and optimizer, and return its step and the carried state."""
    saved = read_checkpoint(path)
    try:
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, KeyError, ValueError) as problem:
        raise ValueError(f"{path} cannot be resumed: {problem}; delete it to start again") from None
    return saved["step"], saved["carried"]
