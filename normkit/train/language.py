"""Language modelling over running text: each row of the batch reads on where it stopped."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.data.batches import Batches
from normkit.train.task import Batch, Task
from normkit.transforms import calibrate

LENGTH = 64  # words of context
CALIBRATION = 100


class Language(Task):
    """A decoder-only Transformer on pieces of text of 64 words; perplexity."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Pieces in random order; the cuts between pieces move with each epoch."""
        pieces = max(1, self.settings.batch_tokens // LENGTH)

        def order(epoch: int) -> list[list[int]]:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
            offset = int(torch.randint(LENGTH, (), generator=generator))
            starts = torch.arange(offset, len(self.data.train) - LENGTH - 1, LENGTH)
            shuffled = starts[torch.randperm(len(starts), generator=generator)].tolist()
            return [shuffled[at : at + pieces] for at in range(0, len(shuffled) - pieces + 1, pieces)]

        return iter(Batches(order, lambda starts: _pieces(self.data.train, starts), start))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of the next words."""
        given, target = batch.tensors
        return F.cross_entropy(self.model(given).flatten(0, 1), target.flatten(), label_smoothing=smoothing)

    def validation(self) -> list[Batch]:
        """All of the validation split."""
        return _all_pieces(self.data.valid)

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Perplexity with running statistics, and with calibrated ones; a word sees at most 64 before it."""
        tell("scoring")
        scores = {"running": self._perplexity()}
        if self.has_statistics():
            batches = [batch for batch, _ in zip(self.batches(0), range(CALIBRATION), strict=False)]
            trained = self.model
            self.model = calibrate(trained, batches, forward=lambda model, b: model(self.on_device(b).tensors[0]))
            scores["calibrated"] = self._perplexity()
            self.model = trained
        return scores

    def _perplexity(self) -> dict[str, float]:
        batches = _all_pieces(self.data.test)
        loss = self.mean_loss(batches)
        return {"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "n": sum(b.tokens for b in batches)}


def _pieces(text: Tensor, starts: list[int]) -> Batch:
    at = torch.tensor(starts)[:, None] + torch.arange(min(LENGTH, len(text) - 1 - max(starts)) + 1)
    piece = text[at].long()
    return Batch((piece[:, :-1], piece[:, 1:]), piece[:, 1:].numel(), piece[:, 1:].numel())


def _all_pieces(text: Tensor, together: int = 16) -> list[Batch]:
    """The text from its first word to its last, cut into pieces; the last piece, which is shorter, comes alone."""
    whole = (len(text) - 1) // LENGTH
    starts = [LENGTH * piece for piece in range(whole)]
    batches = [_pieces(text, starts[at : at + together]) for at in range(0, whole, together)]
    return [*batches, _pieces(text, [LENGTH * whole])] if LENGTH * whole < len(text) - 1 else batches
