"""Language modelling on running text, cut into pieces of `context` words."""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.batches import Batches
from normkit.lab.models.lm import DecoderLM
from normkit.lab.train.task import Batch, Task


class Language(Task):
    """Cross-entropy of the next word; perplexity per word."""

    calibration_batches: ClassVar[int] = 100

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield pieces in random order; the cuts between pieces move with each epoch."""
        length = self.settings.context
        pieces = max(1, self.settings.batch_tokens // length)
        if len(self.data.train) < 2 * length + 1:
            raise ValueError(f"{self.data.name} has {len(self.data.train) - 1} words to train on; needs {2 * length}")

        def order(epoch: int) -> list[list[int]]:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
            offset = int(torch.randint(length, (), generator=generator))
            starts = torch.arange(offset, len(self.data.train) - length - 1, length)
            shuffled = starts[torch.randperm(len(starts), generator=generator)].tolist()
            return [shuffled[at : at + pieces] for at in range(0, len(shuffled) - pieces + 1, pieces)]

        return iter(Batches(order, lambda starts: _pieces(self.data.train, starts, length), start))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of the next words."""
        given, target = batch.tensors
        if isinstance(self.model, DecoderLM) and self.settings.model.adaptive and not smoothing:
            return self.model.nll(given, target)
        return F.cross_entropy(self.model(given).flatten(0, 1), target.flatten(), label_smoothing=smoothing)

    def validation_batches(self) -> list[Batch]:
        """Return the whole validation split."""
        return _all_pieces(self.data.valid, self.settings.context)

    def score_test(self) -> dict[str, float]:
        """Return loss, and perplexity per word of the whole test split.

        A word attends to those before it in its piece of `context` words, as in the papers. If the text is in subwords,
        their total loss is divided by the number of words.
        """
        batches = _all_pieces(self.data.test, self.settings.context)
        loss, symbols = self.mean_loss(batches), sum(batch.tokens for batch in batches)
        words = self.data.words or symbols
        return {"loss": loss, "perplexity": math.exp(min(loss * symbols / words, 700.0)), "n": words}


def _pieces(text: Tensor, starts: list[int], length: int) -> Batch:
    at = torch.tensor(starts)[:, None] + torch.arange(min(length, len(text) - 1 - max(starts)) + 1)
    piece = text[at].long()
    return Batch((piece[:, :-1], piece[:, 1:]), piece[:, 1:].numel(), piece[:, 1:].numel())


def _all_pieces(text: Tensor, length: int, together: int = 16) -> list[Batch]:
    """Cut the text into pieces in order; the shorter last piece is a batch of its own."""
    whole = (len(text) - 1) // length
    starts = [length * piece for piece in range(whole)]
    batches = [_pieces(text, starts[at : at + together], length) for at in range(0, whole, together)]
    return [*batches, _pieces(text, [length * whole], length)] if length * whole < len(text) - 1 else batches
