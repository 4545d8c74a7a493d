"""Losses of a run, and what the best constant prediction would have."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# criteria of which the loss of a constant prediction is known
CLASSES, NUMBERS, SHARES = (nn.CrossEntropyLoss, nn.NLLLoss), (nn.MSELoss,), (nn.BCELoss, nn.BCEWithLogitsLoss)


class LossMeter:
    """Mean loss of the steps since the last sample, and the loss of the best constant prediction.

    >>> meter = LossMeter()
    >>> meter.add(2.0)
    >>> meter.add(1.0)
    >>> meter.add_targets(torch.tensor([0, 0, 1, 1]), 3)
    >>> {name: round(value.item(), 3) for name, value in meter.take().items()}
    {'loss': 1.5, 'constant_loss': 0.693}
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0
        self.frequencies: Tensor | None = None  # [classes], of all targets so far
        self.smoothing = 0.0
        self.moments: Tensor | None = None  # [3, columns] of targets that are numbers: count, sum, sum of squares
        self.binary = False  # they are shares, of binary cross-entropy
        self.of_step = 0  # losses of criteria
        self.several = False  # more than one in a step: no constant is known
        self.divides: bool | None = None  # the model divides its loss by `num_items_in_batch`
        self.seen = False  # a loss has been added

    def add(self, loss: Tensor | float) -> None:
        """Add the loss of a step."""
        loss = torch.as_tensor(loss).detach().float().mean()
        self.total = loss if self.total is None else self.total.to(loss.device) + loss
        self.count += 1
        self.seen = True

    def add_output(self, model: nn.Module, output: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        """Add the loss that a model of Hugging Face returns, and the labels that it was given."""
        if not isinstance(loss := output.get("loss"), Tensor):
            return
        logits, labels, all_items = output.get("logits"), kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if isinstance(logits, Tensor) and isinstance(labels, Tensor) and not labels.is_floating_point():
            self.add_targets(labels, logits.shape[-1])
            loss = loss if all_items is None else self._of_batch(model, loss, logits, labels, all_items)
        self.add(loss)

    def _of_batch(self, model: nn.Module, loss: Tensor, logits: Tensor, labels: Tensor, all_items: Any) -> Tensor:
        """Return the mean loss of a batch; some models divide it by the labels of all batches."""
        inner = getattr(model, "module", model)  # of DDP
        shifted = int(logits.dim() == 3 and getattr(inner, "loss_type", "") == "ForCausalLM")
        labels = labels[..., shifted:]
        labels = torch.where((labels >= 0) & (labels < logits.shape[-1]), labels, -100)
        whole = loss * all_items / (labels != -100).sum().clamp(min=1)
        if self.divides is None:  # once: a loss of another form is taken as it is
            logits, self.divides = logits[..., : logits.shape[-2] - 1, :] if shifted else logits, False
            if logits.shape[:-1] == labels.shape:
                with torch.no_grad():
                    mean = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
                self.divides = bool((whole - mean).abs() < (loss - mean).abs())
        return whole if self.divides else loss

    def add_criterion(self, criterion: nn.Module, args: tuple, loss: Tensor) -> None:
        """Add the loss that a criterion returned, and the targets that it was called with."""
        self.add(loss)
        self.of_step += 1
        self.several |= self.of_step > 1
        kind = next((k for k in (*CLASSES, *NUMBERS, *SHARES) if type(criterion).forward is k.forward), None)
        weighted = any(getattr(criterion, name, None) is not None for name in ("weight", "pos_weight"))
        if len(args) != 2 or weighted or getattr(criterion, "reduction", "") != "mean":
            return
        given, targets = args
        if kind in NUMBERS or kind in SHARES:
            self.add_numbers(targets, kind in SHARES)
        elif kind in CLASSES and given.dim() > 1 and not targets.is_floating_point():
            ignored, smoothing = getattr(criterion, "ignore_index", -100), getattr(criterion, "label_smoothing", 0.0)
            self.add_targets(targets, given.shape[1], ignored, smoothing)

    def add_targets(self, targets: Tensor, classes: int, ignored: int = -100, smoothing: float = 0.0) -> None:
        """Count the classes that the loss compares predictions with."""
        targets = targets.detach().flatten()
        real = (targets != ignored) & (targets >= 0) & (targets < classes)
        old = targets.new_zeros(classes, dtype=torch.float32) if self.frequencies is None else self.frequencies
        self.frequencies = old.to(targets.device).index_add(0, torch.where(real, targets, 0).long(), real.float())
        self.smoothing = smoothing

    def add_numbers(self, targets: Tensor, binary: bool = False) -> None:
        """Add targets `[batch, ...]` of a squared error or a `binary` cross-entropy.

        A constant prediction may differ from place to place of a target.
        """
        if not targets.numel():
            return
        wide = torch.float32 if targets.device.type == "mps" else torch.float64
        places = targets.detach().to(wide).reshape(len(targets) if targets.dim() else 1, -1)
        sums = torch.stack([torch.ones_like(places).sum(0), places.sum(0), places.square().sum(0)])
        if self.moments is not None and self.moments.shape != sums.shape:  # as of sequences: one constant for all
            self.moments, sums = (each.view(3, -1).sum(1, keepdim=True) for each in (self.moments, sums))
        self.moments = sums if self.moments is None else self.moments.to(sums.device) + sums
        self.binary = binary

    def take(self) -> dict[str, Tensor]:
        """Return the mean loss since the last time; empty without one."""
        if self.total is None:
            return {}
        fields, self.total = {"loss": self.total / self.count}, None
        self.count = 0
        if self.frequencies is not None and not self.several:
            share = self.frequencies / self.frequencies.sum().clamp(min=1)
            share = torch.lerp(share, torch.full_like(share, 1 / len(share)), self.smoothing)
            fields["constant_loss"] = torch.special.entr(share).sum()
        if self.moments is not None and not self.several:
            mean, square = self.moments[1:] / self.moments[0].clamp(min=1)
            entropy = torch.special.entr(mean) + torch.special.entr(1 - mean)
            each = entropy if self.binary else (square - mean.square()).clamp(min=0)
            fields["constant_loss"] = each.mean().float()
        return fields
