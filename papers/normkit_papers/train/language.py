"""Language modelling on running text, cut into pieces of `context` words."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from normkit_papers.data.batches import Batch, endless
from normkit_papers.models.blocks import Cache
from normkit_papers.models.lm import DecoderLM
from normkit_papers.tasks import perplexity
from normkit_papers.train.config import Run
from normkit_papers.train.task import Task

TOGETHER = 16  # pieces of an evaluation
VALID_STREAMS = 10  # parts of the validation split that are read beside each other


class Language(Task):
    """Cross-entropy of the next word; perplexity per word.

    A recurrent model reads texts as streams: row r of a batch continues row r of the batch before, and `carried` has
    the state in between, by model. It starts empty with each epoch and each evaluation.
    """

    calibration_batches: int = 100

    def __init__(self, run: Run, model: nn.Module, data: Any):
        super().__init__(run, model, data)
        if run.model.adaptive and not run.label_smoothing:
            self.criterion = None
        self.carried: WeakKeyDictionary[nn.Module, Cache] = WeakKeyDictionary()

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield pieces in random order, or in order to a recurrent model.

        The cuts between pieces in random order move with each epoch.
        """
        length = self.settings.context
        pieces = max(1, self.settings.batch_tokens // length)
        needed = length * (pieces if self.settings.model.recurrent else pieces + 1)  # the cuts move by up to a piece
        if len(self.data.train) < needed + 1:
            raise ValueError(f"{self.data.name} has {len(self.data.train) - 1} words to train on; needs {needed}")
        if self.settings.model.recurrent:
            count = (len(self.data.train) - 1) // (length * pieces)
            streams = _streams(self.data.train[: count * length * pieces + 1], length, pieces)
            return endless(lambda _: streams, lambda batch: batch, start, stride)

        def order(epoch: int) -> list[list[int]]:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
            offset = int(torch.randint(length, (), generator=generator))
            starts = torch.arange(offset, len(self.data.train) - length - 1, length)
            shuffled = starts[torch.randperm(len(starts), generator=generator)].tolist()
            return [shuffled[at : at + pieces] for at in range(0, len(shuffled) - pieces + 1, pieces)]

        return endless(order, lambda starts: _pieces(self.data.train, starts, length), start, stride)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of the next words."""
        given, target = batch.tensors
        cache = self._continue(self.model, batch)
        if isinstance(self.model, DecoderLM) and self.settings.model.adaptive and not smoothing:
            return self.model.nll(given, target, cache)
        logits = self.model(given, cache)[:, -target.shape[1] :]
        return self.cross_entropy(logits.flatten(0, 1), target.flatten(), smoothing)

    def _continue(self, model: nn.Module, batch: Batch) -> Cache | None:
        """Return the state that a batch continues and updates; None if the model carries none."""
        if not self.settings.model.recurrent:
            return None
        before = {} if batch.fresh else self.carried.get(model, {})
        now = {name: tuple(part.to(self.device) for part in state) for name, state in before.items()}
        self.carried[model] = now  # a checkpoint's was on the CPU
        return now

    def forward_norms(self, model: Any, batch: Batch) -> Any:
        """Compute the logits, with what the model carries."""
        batch = self.on_device(batch)
        return model(batch.tensors[0], self._continue(model, batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state that the next batch continues."""
        checkpoint["carried"] = self.carried.get(self.model, {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state that the next batch continues."""
        self.carried[self.model] = checkpoint.get("carried", {})

    def validation_batches(self) -> list[Batch]:
        """Return the whole validation split."""
        if self.settings.model.recurrent:
            streams = min(VALID_STREAMS, len(self.data.valid) - 1)  # at least a word each
            return _streams(self.data.valid, self.settings.context, streams)
        return _all_pieces(self.data.valid, self.settings.context)

    def mean_loss(self, batches: list[Batch], smoothing: float = 0.0) -> float:
        """Return the mean loss of batches, at inference; the state of the training stays as it is."""
        carried, self.carried = self.carried, WeakKeyDictionary()
        try:
            return super().mean_loss(batches, smoothing)
        finally:
            self.carried = carried

    def score_test(self) -> dict[str, float]:
        """Return loss, and perplexity per word of the whole test split.

        A word attends to those before it in its piece of `test_context` words and to `test_memory` words before the
        piece; an LSTM's state has seen all words before. If the text is in subwords, their total loss is divided by
        the number of words.
        """
        model, length = self.settings.model, self.settings.test_context or self.settings.context
        recurrent = model.recurrent
        batches = (
            _streams(self.data.test, length, 1)
            if recurrent
            else _all_pieces(self.data.test, length, model.memory_at_test)
        )
        loss, symbols = self.mean_loss(batches), sum(batch.tokens for batch in batches)
        words = self.data.words or symbols
        return {"loss": loss, "perplexity": perplexity(loss * symbols / words), "n": words}


def _streams(text: Tensor, length: int, rows: int) -> list[Batch]:
    """Cut the text into `rows` streams side by side, and these into pieces in order.

    The last piece may be shorter. Up to `rows - 1` words at the end of the text are left out: streams are equally long.
    """
    size = (len(text) - 1) // rows
    given, target = (text[at : at + rows * size].view(rows, size) for at in (0, 1))
    cuts = zip(given.split(length, 1), target.split(length, 1), strict=True)
    return [Batch((x.long(), y.long()), y.numel(), y.numel(), number == 0) for number, (x, y) in enumerate(cuts)]


def _pieces(text: Tensor, starts: list[int], length: int, before: int = 0) -> Batch:
    """Return a piece from each start on, and `before` words before it that are not scored."""
    at = torch.tensor(starts)[:, None] + torch.arange(-before, min(length, len(text) - 1 - max(starts)) + 1)
    piece = text[at].long()
    target = piece[:, before + 1 :]
    return Batch((piece[:, :-1], target), target.numel(), target.numel())


def _all_pieces(text: Tensor, length: int, before: int = 0) -> list[Batch]:
    """Cut the text into pieces; shorter ones, first and last, are batches of their own."""
    starts = range(0, len(text) - 1, length)
    alike = [start for start in starts if start >= before and start + length < len(text)]
    others = [start for start in starts if start < before or start + length >= len(text)]
    batches = [_pieces(text, alike[at : at + TOGETHER], length, before) for at in range(0, len(alike), TOGETHER)]
    return [*batches, *(_pieces(text, [start], length, min(start, before)) for start in others)]
