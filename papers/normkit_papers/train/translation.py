"""Sequence-to-sequence tasks: training, and error rates with three kinds of statistics."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normkit_papers.data.batches import batches_of, endless, static_batches
from normkit_papers.data.vocab import PAD, Vocab
from normkit_papers.train.decode import Search, beam_search, greedy
from normkit_papers.train.donor_kinds import DONORS
from normkit_papers.train.donors import Donors
from normkit_papers.train.error_rates import error_rates
from normkit_papers.train.pairs import PairTable, spread
from normkit_papers.train.task import Batch, Task

DECODED_TOGETHER = 250  # sentences; results do not depend on it


class Translation(Task):
    """Cross-entropy with label smoothing; PER and WER of greedy and beam search."""

    calibration_batches: int = 200

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self._train, self._valid, test = self.splits()
        self._test_items = spread(len(test), run.test_items or len(test))
        self._test = test.take(self._test_items)

    def splits(self) -> tuple[PairTable, PairTable, PairTable]:
        """Return the training, validation and test split.

        Raises:
            ValueError: If a sequence is longer than the model's max_length.
        """
        longest, data = self.settings.model.max_length, self.data
        train, valid, test = (PairTable.of(split) for split in (data.train, data.valid, data.test))
        for name, table in (("train", train), ("valid", valid), ("test", test)):
            if int(table.both.max()) > longest:
                raise ValueError(
                    f"the {name} split of {data.name} has a sequence of {int(table.both.max())} symbols, more than "
                    f"max_length={longest}; leave it out or raise --model.max-length"
                )
        return train, valid, test

    def rate(self, decoded: list[list[str]]) -> dict[str, float]:
        """Return scores of the decoded symbols of each test item."""
        return error_rates(decoded, [self.data.references[item] for item in self._test_items])

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield batches of `batch_tokens` symbols of source and target, bucketed by length or not."""
        run, table = self.settings, self._train
        if run.static:
            longest = table.both.max(1)
            return endless(
                lambda epoch: static_batches(longest, run.batch_tokens, seed=run.seed, epoch=epoch),
                lambda items: table.batch(items, static=run.model.max_length),
                start,
                stride,
            )
        return endless(lambda epoch: self._order(table, epoch), table.batch, start, stride)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy per target symbol, without symbols that `mask_logits` masks."""
        source, given, target = batch.tensors
        scores = self.model(source, given)
        if self.settings.model.mask_logits:
            allowed = self.model.get_buffer("allowed")
            target = target.where(allowed[target], PAD)  # the loss of a masked symbol would be about 1e9
            if smoothing:
                return _smoothed(scores.flatten(0, 1), target.flatten(), smoothing, allowed)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    def mean_loss(self, batches: list[Batch], smoothing: float = 0.0) -> float:
        """Return the mean loss per target symbol, at inference, without symbols that are masked."""
        if self.settings.model.mask_logits:
            allowed = self.model.get_buffer("allowed").cpu()
            batches = [batch._replace(tokens=int(allowed[batch.tensors[2].cpu()].sum())) for batch in batches]
        return super().mean_loss(batches, smoothing)

    def validation_batches(self) -> list[Batch]:
        """Return `valid_items` items, evenly spaced in the validation split."""
        count = self.settings.valid_items or len(self._valid)
        return self._valid.take(spread(len(self._valid), count)).batches(self.settings.batch_tokens)

    def score(self, on_stage: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Score the test split; the model is unchanged afterwards.

        Returns:
            Scores of greedy search with "running" statistics; with those of "donors", other training items of the same
            lengths; "calibrated" on training batches; and of "beam" search with running statistics.
        """
        scores = super().score(on_stage)
        if self.has_statistics():
            on_stage("scoring with statistics of donors")
            scores["donors"] = self.score_donors("donors")
        on_stage("beam search")
        self.kind = "beam"
        scores[self.kind] = self.rate(self.decode_all(beam_search(self.settings)))
        return scores

    def score_test(self) -> dict[str, float]:
        """Return loss, and scores of greedy search."""
        self.model.eval()
        loss = self.mean_loss(self._test.batches(self.settings.batch_tokens))
        return {"loss": loss, **self.rate(self.decode_all(greedy))}

    def decode(self, search: Search, batch: Batch) -> list[list[str]]:
        """Decode a batch into symbols."""
        return transcribe(self.model, self.data.vocabularies["target"], self.on_device(batch).tensors[0], search)

    def decode_all(self, search: Search, table: PairTable | None = None) -> list[list[str]]:
        """Decode a table's items (default: the test split); halve batches if memory runs out."""
        table = self._test if table is None else table
        found, waiting = [list[str]()] * len(table), table.sorted_items(DECODED_TOGETHER)
        while waiting:
            items = waiting.pop(0)
            try:
                for item, symbols in zip(items, self.decode(search, table.batch(items)), strict=True):
                    found[item] = symbols
            except torch.cuda.OutOfMemoryError:
                if len(items) == 1:
                    raise
                waiting[:0] = items[: len(items) // 2], items[len(items) // 2 :]  # same result for each sentence
        return found

    def score_donors(self, kind: str) -> dict[str, float]:
        """Return loss, scores of greedy search and symbols of an output, by donor batches.

        Test items are in batches of similar lengths, and each has its donor in a batch of training items.

        Args:
            kind: A row of `DONORS`.
        """
        self.model.eval()
        self.kind, loss, tokens = kind, 0.0, 0
        test, donors = self._test, Donors(self._train.both)
        found = [list[str]()] * len(test)
        for items in batches_of(test.sizes, self.settings.batch_tokens, bucketing=True, by=test.both):
            others = self._train.batch(donors.choose(test.both[items], DONORS[kind]))
            batch = self.on_device(test.batch(items))
            with self.calibrated([others], DONORS[kind].sites):
                loss, tokens = loss + self.mean_loss([batch]) * batch.tokens, tokens + batch.tokens
                for item, symbols in zip(items, self.decode(greedy, batch), strict=True):
                    found[item] = symbols
        length = sum(map(len, found)) / len(found)
        return {"loss": loss / tokens, "symbols": length, **self.rate(found)}

    def _order(self, table: PairTable, epoch: int) -> list[np.ndarray]:
        run = self.settings
        by = table.both if run.bucket_by == "both" else table.both[:, 0]
        return batches_of(table.sizes, run.batch_tokens, bucketing=run.bucketing, by=by, seed=run.seed, epoch=epoch)

    def forward_norms(self, model: Any, batch: Batch) -> Tensor:
        """Compute the scores of all target symbols."""
        return model(*self.on_device(batch).tensors[:2])


def _smoothed(scores: Tensor, target: Tensor, smoothing: float, allowed: Tensor) -> Tensor:
    """Return the cross-entropy with label smoothing over the allowed words only."""
    real = target != PAD
    log_p = scores[real].log_softmax(-1)
    even = log_p.where(allowed, 0.0).sum(-1) / allowed.sum()
    exact = log_p.gather(-1, target[real][:, None])[:, 0]
    return -((1 - smoothing) * exact + smoothing * even).mean()


def transcribe(model: Any, target: Vocab, source: Tensor, search: Search) -> list[list[str]]:
    """Decode `source [batch, time]` into at most `2 * time + 10` symbols."""
    limit = (2 * (source != PAD).sum(1) + 10).clamp(max=model.config.max_length)
    return [target.decode(sequence) for sequence in search(model, source, limit).sequences]
