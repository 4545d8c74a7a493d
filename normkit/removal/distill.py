"""Distance of a model from its original, and training that makes it small."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.models.invoke import Forward, Pick, call, seen
from normkit.norms import Norm

CLIP = 1.0  # largest norm of a gradient
BETAS = (0.9, 0.98)  # momentums of AdamW
WEIGHT_DECAY = 0.01  # of matrices
POOLED = 3.0  # weight in the loss of the mean over each sequence, which is what users of sentence encoders take
SAVE_EVERY, SECONDS = 50, 60.0  # steps, or seconds, from one checkpoint to the next

Loss = Callable[[nn.Module, Any], Tensor]


class Comparison(NamedTuple):
    """What is compared between a model and its original.

    Logits are compared by the Kullback-Leibler divergence in nats, vectors by 1 - cosine.
    """

    original: nn.Module  # in evaluation mode
    outputs: Pick | None  # picks a tensor `[..., channels]` of the output; None: its logits or first tensor
    logits: bool
    forward: Forward | None  # called as `forward(model, batch)` in place of the model

    def values(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a model's output that is compared, in float32 or wider."""
        found = call(model, batch, self.forward)
        found = pick_output(found) if self.outputs is None else self.outputs(found)
        return found if found.dtype is torch.float64 else found.float()

    def distance(self, mine: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
        """Return the distance of each real position, `[positions]`."""
        x, y = (_real(each, mask) for each in (mine, theirs))
        if self.logits:
            return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return (1 - F.cosine_similarity(x, y, dim=-1)).clamp_min(0)  # rounding may leave -1e-8

    def mean(self, model: nn.Module, batches: Iterable[Any]) -> float:
        """Return the mean of `distances`."""
        return float(self.distances(model, batches).double().mean())

    @torch.no_grad()
    def distances(self, model: nn.Module, batches: Iterable[Any]) -> Tensor:
        """Return the distance of each real position; of vectors over time, of their means."""
        found = []
        for batch in batches:
            mask, theirs, mine = mask_of(batch), self.values(self.original, batch), self.values(model, batch)
            if not self.logits and mine.dim() == 3:
                mask, theirs, mine = None, pooled(theirs, mask), pooled(mine, mask)
            found.append(self.distance(mine, theirs, mask))
        return torch.cat(found)

    def loss(self, sites: Sequence[str]) -> Loss:
        """Return a loss for `train`: distances of outputs and of what the modules `sites` return."""

        def loss(model: nn.Module, batch: Any) -> Tensor:
            found: list[tuple[Tensor, Tensor | None]] = []
            wanted: list[Tensor] = []
            with torch.no_grad(), seen(self.original, sites, lambda name, x, mask, y: wanted.append(y)):
                theirs = self.values(self.original, batch)
            with seen(model, sites, lambda name, x, mask, y: found.append((y, mask))):
                mine = self.values(model, batch)
            mask = mask_of(batch)
            inner = [relative_error(x, y, real) for (x, real), y in zip(found, wanted, strict=True)]
            total = self.distance(mine, theirs, mask).mean() + torch.stack(inner).mean()
            if self.logits or mine.dim() != 3:
                return total
            return total + POOLED * (1 - F.cosine_similarity(pooled(mine, mask), pooled(theirs, mask))).mean()

        return loss


def pick_output(found: Any) -> Tensor:
    """Return the logits of what a model returns, or its hidden states, or the tensor that it is.

    >>> pick_output(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    for key in ("logits", "last_hidden_state"):
        if (tensor := getattr(found, key, None)) is not None:
            return tensor
    if isinstance(found, Tensor):
        return found
    raise TypeError(f"the model returns a {type(found).__name__}; pick a tensor of it with outputs=lambda out: ...")


def mask_of(batch: Any) -> Tensor | None:
    """Return the mask of real tokens that a batch of keywords has as `attention_mask`."""
    given = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return None if given is None else given.bool()


def pooled(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the real tokens of each sequence, `[batch, channels]`."""
    weight = torch.ones_like(values[..., :1]) if mask is None else mask[..., None].to(values.dtype)
    return (values * weight).sum(1) / weight.sum(1)


def relative_error(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the squared error over real tokens, relative to the variance of `y`."""
    x, y = (_real(each.float(), mask) for each in (x, y))
    return F.mse_loss(x, y) / y.var()


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows of real positions; all if the mask is of other positions."""
    return x.flatten(0, -2) if mask is None or mask.shape != x.shape[:-1] else x[mask]


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float,
    dropout: bool = False,
    frozen: bool = True,
    checkpoint: Path | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> None:
    """Train a model, or one block of it, in place; it is in evaluation mode afterwards.

    AdamW with a short warm-up, then a cosine to zero; gradients are clipped. Parameters without `requires_grad` stay.
    To train one block towards that of the original, pass the block, inputs of it as batches, and a loss that calls both
    blocks, such as `lambda block, x: relative_error(block(x), original_block(x))`.

    Args:
        model: The model or block.
        loss: Called as `loss(model, batch)`.
        batches: Gives at least `steps` batches.
        steps: Number of steps.
        lr: Highest learning rate.
        dropout: Train with the model's dropout.
        frozen: Keep the statistics of norms: they train as they will be at inference, and cannot drift.
        checkpoint: File to write every 50 steps, or each minute; one that exists is continued, with the batches that
            follow.
        on_step: Called as `on_step(step, loss)` after each step.

    Raises:
        ValueError: If the loss is not finite, or there are too few batches.
    """
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, Norm):
            module.train(not frozen)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS)
    warmup = min(100, steps // 10 + 1)
    done, written = 0, time.monotonic()
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step, batch in enumerate(islice(batches, done, steps), done + 1):
        torch.manual_seed(step)  # for dropout, so that a continued training is the same
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, step / warmup) * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        value = loss(model, batch)
        if not value.isfinite():
            raise ValueError(f"the loss is {float(value.detach())} at step {step}; lower lr={lr:g}")
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        done = step
        due = step % SAVE_EVERY == 0 or time.monotonic() - written > SECONDS
        if checkpoint is not None and due and step < steps:
            written = time.monotonic()
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            new.replace(checkpoint)
        if on_step is not None:
            on_step(step, float(value.detach()))
    if done < steps:
        raise ValueError(f"the batches ended after {done} of {steps} steps; give more, or fewer steps")
    model.eval()
