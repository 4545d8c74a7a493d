"""Sequences rewritten as others, here spelling as sound: training, and error rates under three kinds of statistics."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.batches import Batches, batches_of, static_batches
from normkit.lab.data.vocab import PAD, Vocab
from normkit.lab.train.decode import beam, greedy
from normkit.lab.train.error_rates import error_rates
from normkit.lab.train.pairs import Table, spread
from normkit.lab.train.task import Batch, Task
from normkit.transforms import calibrate

CALIBRATION = 200  # training batches that calibration looks at
TOGETHER = 250  # items decoded at once, where the batch does not matter


class Translation(Task):
    """Encoder and decoder, cross-entropy with label smoothing; greedy and beam search; PER and WER."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self.kind = "running"  # of the scores that are being made
        self._train, self._valid, test = self.tables()
        self._asked = spread(len(test), run.test_items or len(test))
        self._test = test.take(self._asked)

    def tables(self) -> tuple[Table, Table, Table]:
        """The three splits."""
        return Table.of(self.data.train), Table.of(self.data.valid), Table.of(self.data.test)

    def rates(self, found: dict[int, list[str]]) -> dict[str, float]:
        """Scores of the symbols found for each test item."""
        answers = [self.data.references[item] for item in self._asked]
        return error_rates([found[item] for item in range(len(found))], answers)

    def batches(self, start: int) -> Iterator[Batch]:
        """Batches of about one length, or of any lengths; a batch has `batch_tokens` symbols of source and target."""
        run, table = self.settings, self._train
        if run.static:
            longest = table.both.max(1)
            return iter(
                Batches(
                    lambda epoch: static_batches(longest, run.batch_tokens, seed=run.seed, epoch=epoch),
                    lambda items: table.batch(items, static=True),
                    start,
                )
            )
        return iter(Batches(lambda epoch: self._order(table, epoch), table.batch, start))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of the target's symbols; with `mask_logits`, of those that can be said."""
        source, given, target = batch.tensors
        scores = self.model(source, given)
        if self.settings.model.mask_logits:
            allowed = self.model.get_buffer("allowed")
            target = target.where(allowed[target], PAD)  # one that no training target has would cost a billion
            if smoothing:
                return _smoothed(scores.flatten(0, 1), target.flatten(), smoothing, allowed)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    def validation(self) -> list[Batch]:
        """Items spread evenly over the validation split, as many as the run says."""
        count = self.settings.valid_items or len(self._valid)
        return self._valid.take(spread(len(self._valid), count)).batches(self.settings.batch_tokens)

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Greedy search with running statistics, those of each test batch, calibrated ones; then beam search.

        "batch": test items in batches made as for training, the statistics of each from one pass that is given the
        right answers. "calibrated": from `CALIBRATION` training batches, by one pass as in training.
        """
        self.model.eval()
        scores, self.kind = {}, "running"
        tell("decoding")
        scores[self.kind] = self.score_greedy()
        if self.has_statistics():
            tell("decoding with batch statistics")
            self.kind = "batch"
            scores[self.kind] = self._search_by_batch()
            tell("calibrating")
            batches = [batch for batch, _ in zip(self.batches(0), range(CALIBRATION), strict=False)]
            trained, self.model = self.model, calibrate(self.model, batches, forward=self._forward)
            self.kind = "calibrated"
            scores[self.kind] = self.score_greedy()
            self.model = trained
        tell("beam search")
        self.kind = "beam"
        scores[self.kind] = self.rates(self.search_all(self.beam))
        return scores

    def score_greedy(self) -> dict[str, float]:
        """Loss, and scores of greedy search, with the statistics that the model has."""
        self.model.eval()
        loss = self.mean_loss(self._test.batches(self.settings.batch_tokens))
        return {"loss": loss, **self.rates(self.search_all(greedy))}

    def beam(self, model: Any, source: Tensor, limit: Tensor) -> Any:
        """Beam search as the run says."""
        run = self.settings
        return beam(model, source, run.beam, run.length_penalty, limit, run.length_offset)

    def search(self, find: Callable, items: list[int], table: Table | None = None) -> list[list[str]]:
        """What the model makes of items, of the test split unless said otherwise."""
        (source,) = self.on_device((table or self._test).batch(items)).tensors[:1]
        return transcribe(self.model, self.data.vocabularies["target"], source, find)

    def search_all(self, find: Callable, table: Table | None = None) -> dict[int, list[str]]:
        """What the model makes of each item of a table, that of the test split unless said otherwise."""
        found: dict[int, list[str]] = {}
        waiting = (table or self._test).sorted_items(TOGETHER)
        while waiting:
            items = waiting.pop(0)
            try:
                found.update(zip(items, self.search(find, items, table), strict=True))
            except torch.cuda.OutOfMemoryError:
                if len(items) == 1:
                    raise
                waiting[:0] = items[: len(items) // 2], items[len(items) // 2 :]  # it makes the same of each sentence
        return found

    def _search_by_batch(self) -> dict[str, float]:
        found, loss, tokens, trained = {}, 0.0, 0, self.model
        for items in map(np.ndarray.tolist, self._order(self._test, epoch=0)):
            batch = self.on_device(self._test.batch(items))
            self.model = calibrate(trained, [batch], forward=self._forward)
            loss, tokens = loss + self.mean_loss([batch]) * batch.tokens, tokens + batch.tokens
            found.update(zip(items, self.search(greedy, items), strict=True))
        self.model = trained
        return {"loss": loss / tokens, **self.rates(found)}

    def _order(self, table: Table, epoch: int) -> list[np.ndarray]:
        run, by = self.settings, table.both
        return batches_of(table.sizes, run.batch_tokens, bucketing=run.bucketing, by=by, seed=run.seed, epoch=epoch)

    def _forward(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return model(*self.on_device(batch).tensors[:2])


def _smoothed(scores: Tensor, target: Tensor, smoothing: float, allowed: Tensor) -> Tensor:
    """Cross-entropy whose smoothing goes to the words that can be said alone."""
    real = target != PAD
    log_p = scores[real].log_softmax(-1)
    even = log_p.where(allowed, 0.0).sum(-1) / allowed.sum()
    exact = log_p.gather(-1, target[real][:, None])[:, 0]
    return -((1 - smoothing) * exact + smoothing * even).mean()


def transcribe(model: Any, target: Vocab, source: Tensor, find: Callable = greedy) -> list[list[str]]:
    """Symbols that a search finds for `source [B, S]`; at most twice as many as the source has, and ten."""
    limit = (2 * (source != PAD).sum(1) + 10).clamp(max=model.config.max_length)
    return [target.decode(sequence) for sequence in find(model, source, limit).sequences]
