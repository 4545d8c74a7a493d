"""Sequences rewritten as others, here spelling as sound: training, and error rates under three kinds of statistics."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.data.batches import Batches, batches_of
from normkit.data.vocab import BOS, PAD, Vocab
from normkit.train.decode import beam, greedy
from normkit.train.score import error_rates
from normkit.train.task import Batch, Task
from normkit.transforms import calibrate

VALID_WORDS = 500
CALIBRATION = 200  # training batches that calibration looks at
TOGETHER = 250  # items decoded at once, where the batch does not matter
BEAM = 4


class Translation(Task):
    """Encoder and decoder, cross-entropy with label smoothing; greedy and beam search; PER and WER."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self._train = Table(data.train)
        count = run.test_items or len(data.test)
        self._test = Table(_spread(data.test, count))
        self._references = _spread(data.references, count)

    def batches(self, start: int) -> Iterator[Batch]:
        """Batches of about one length, or of any lengths; a batch has `batch_tokens` symbols of source and target."""
        return iter(Batches(lambda epoch: self._order(self._train, epoch), self._train.batch, start))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of the target's symbols."""
        source, given, target = batch.tensors
        scores = self.model(source, given)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    def validation(self) -> list[Batch]:
        """Words spread evenly over the validation split, shortest first."""
        return Table(_spread(self.data.valid, VALID_WORDS)).sorted_batches(TOGETHER)

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Greedy search with running statistics, those of each test batch, calibrated ones; then beam search.

        "batch": test words in batches made as for training, the statistics of each from one pass that is given the
        right answers. "calibrated": from `CALIBRATION` training batches, by one pass as in training.
        """
        self.model.eval()
        scores = {}
        tell("decoding")
        scores["running"] = self.score_greedy()
        if self.has_statistics():
            tell("decoding with batch statistics")
            scores["batch"] = self._search_by_batch()
            tell("calibrating")
            batches = [batch for batch, _ in zip(self.batches(0), range(CALIBRATION), strict=False)]
            trained, self.model = self.model, calibrate(self.model, batches, forward=self._forward)
            scores["calibrated"] = self.score_greedy()
            self.model = trained
        tell("beam search")
        scores["beam"] = self._search(lambda model, source, limit: beam(model, source, BEAM, max_length=limit))
        return scores

    def score_greedy(self) -> dict[str, float]:
        """Loss, and error rates of greedy search, with the statistics that the model has."""
        self.model.eval()
        return {"loss": self.mean_loss(self._test.sorted_batches(TOGETHER)), **self._search(greedy)}

    def search(self, find: Callable, items: list[int]) -> list[list[str]]:
        """What the model makes of test items."""
        (source,) = self.on_device(self._test.batch(items)).tensors[:1]
        return transcribe(self.model, self.data.vocabularies["target"], source, find)

    def _search(self, find: Callable) -> dict[str, float]:
        found: dict[int, list[str]] = {}
        for items in self._test.sorted_items(TOGETHER):
            found.update(zip(items, self.search(find, items), strict=True))
        return self._rates(found)

    def _search_by_batch(self) -> dict[str, float]:
        found, loss, tokens, trained = {}, 0.0, 0, self.model
        for items in self._order(self._test, epoch=0):
            batch = self.on_device(self._test.batch(items))
            self.model = calibrate(trained, [batch], forward=self._forward)
            loss, tokens = loss + self.mean_loss([batch]) * batch.tokens, tokens + batch.tokens
            found.update(zip(items, self.search(greedy, items), strict=True))
        self.model = trained
        return {"loss": loss / tokens, **self._rates(found)}

    def _rates(self, found: dict[int, list[str]]) -> dict[str, float]:
        return error_rates([found[item] for item in range(len(found))], self._references)

    def _order(self, table: "Table", epoch: int) -> list[list[int]]:
        run, by = self.settings, table.both
        return batches_of(table.sizes, run.batch_tokens, bucketing=run.bucketing, by=by, seed=run.seed, epoch=epoch)

    def _forward(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return model(*self.on_device(batch).tensors[:2])


class Table:
    """Pairs of sequences as three padded tensors, from which a batch is cut out."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]]):
        self.source_sizes, self.target_sizes = ([len(pair[side]) for pair in pairs] for side in (0, 1))
        self.source = _padded([pair[0] for pair in pairs], self.source_sizes)
        self.target = _padded([pair[1] for pair in pairs], self.target_sizes)
        self.both = list(zip(self.source_sizes, self.target_sizes, strict=True))
        self.sizes = [sum(both) for both in self.both]

    def batch(self, items: list[int]) -> Batch:
        """Source, what the decoder is given, and what it should say."""
        chosen = torch.tensor(items)
        source = self.source[chosen, : max(self.source_sizes[item] for item in items)].long()
        target = self.target[chosen, : max(self.target_sizes[item] for item in items)].long()
        given = F.pad(target[:, :-1], (1, 0), value=BOS).masked_fill_(target == PAD, PAD)
        return Batch((source, given, target), len(items), sum(self.target_sizes[item] for item in items))

    def sorted_items(self, together: int) -> list[list[int]]:
        """All items, shortest first, so many at a time."""
        order = sorted(range(len(self.sizes)), key=lambda item: (self.source_sizes[item], item))
        return [order[at : at + together] for at in range(0, len(order), together)]

    def sorted_batches(self, together: int) -> list[Batch]:
        """All items in batches, shortest first."""
        return [self.batch(items) for items in self.sorted_items(together)]


def transcribe(model: torch.nn.Module, target: Vocab, source: Tensor, find: Callable = greedy) -> list[list[str]]:
    """Symbols that a search finds for `source [B, S]`; at most twice as many as the source has, and ten."""
    limit = 2 * (source != PAD).sum(1) + 10
    return [target.decode(sequence) for sequence in find(model, source, limit).sequences]


def _padded(sequences: Sequence[list[int]], sizes: Sequence[int]) -> Tensor:
    """As `pad`, quick for a whole corpus, in half the bytes."""
    padded = torch.full((len(sizes), max(sizes)), PAD, dtype=torch.int32)
    padded[torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]] = torch.tensor(
        [*chain(*sequences)], dtype=torch.int32
    )
    return padded


def _spread(items: Sequence, count: int) -> list:
    """`count` of the items, at even distances; all where there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
