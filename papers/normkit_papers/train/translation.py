"""Sequence-to-sequence tasks: spelling to sound, scored by error rates; translation, scored by BLEU."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from normkit_papers.data.batches import Batch, batches_of, endless, spread
from normkit_papers.data.pairs import PairTable
from normkit_papers.data.vocab import PAD, Vocab, spell
from normkit_papers.tasks import perplexity
from normkit_papers.train.decode import Search, beam_search, greedy
from normkit_papers.train.scores import bleu, error_rates, metric
from normkit_papers.train.task import Task

DECODED_TOGETHER = 250  # sentences; results do not depend on it
CHUNK = 2**24  # subwords read at once; a corpus is mapped from a file and may be larger than memory


class Translation(Task):
    """Cross-entropy with label smoothing; PER and WER of greedy and beam search."""

    calibration_batches: int = 200

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        limit, test = run.model.max_length, data.test
        short = np.flatnonzero((data.train.both <= limit).all(1))  # longer training pairs are left out
        self._train = data.train if len(short) == len(data.train) else data.train.take(short)
        self._valid, self._test_items = data.valid, spread(len(test), run.test_items or len(test))
        self._test: PairTable = test.take(self._test_items)
        if not len(short):
            raise ValueError(f"the train split of {data.name} has no pair within max_length={limit}; raise "
                             "--model.max-length")  # fmt: skip
        for name, table in (("valid", data.valid), ("test", test)):
            if (longest := int(table.both.max())) > limit:
                raise ValueError(
                    f"line {int(table.both.max(1).argmax()) + 1} of the {name} split of {data.name} has {longest} "
                    f"symbols, more than max_length={limit}; leave it out or raise --model.max-length"
                )

    def describe_data(self) -> dict[str, object]:
        """Return also the number of training pairs left out."""
        return {**super().describe_data(), "left_out": len(self.data.train) - len(self._train)}

    def rate(self, decoded: list[list[str]]) -> dict[str, float]:
        """Return scores of the decoded symbols of each test item."""
        return error_rates(decoded, [self.data.references[item] for item in self._test_items])

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield batches of `batch_tokens` symbols of source and target, bucketed by length or not."""
        run, table = self.settings, self._train

        def order(epoch: int) -> list[np.ndarray]:
            how: Any = {"bucketing": run.bucketing, "by": table.both, "seed": run.seed, "epoch": epoch}
            return batches_of(table.sizes, run.batch_tokens, **how)

        return endless(order, table.batch, start, stride)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy per target symbol, without symbols that `mask_logits` masks."""
        source, given, target = batch.tensors
        scores = self.model(source, given)
        if self.settings.model.mask_logits:
            allowed = self.model.get_buffer("allowed")  # the loss of a masked symbol would be about 1e9
            scores, target = scores[..., allowed], (allowed.cumsum(0) - 1).masked_fill(~allowed, -1)[target]
            return self.cross_entropy(scores.flatten(0, 1), target.flatten(), smoothing, ignored=-1)
        return self.cross_entropy(scores.flatten(0, 1), target.flatten(), smoothing, ignored=PAD)

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
        """Score also beam search with running statistics, as "beam"; the other scores are of greedy search."""
        scores = super().score(on_stage)
        on_stage("beam search")
        self.kind = "beam"
        scores[self.kind] = self.rate(self.decode_all(beam_search(self.settings)))
        return scores

    def score_test(self) -> dict[str, float]:
        """Return loss, and scores of greedy search."""
        self.model.eval()
        loss = self.mean_loss(self._test.batches(self.settings.batch_tokens))
        return {"loss": loss, **self.rate(self.decode_all(greedy))}

    def decode_all(self, search: Search, table: PairTable | None = None) -> list[list[str]]:
        """Decode a table's items; by default the test split."""
        table = self._test if table is None else table
        found = [list[str]()] * len(table)
        for items in table.sorted_items(DECODED_TOGETHER):
            source = self.on_device(table.batch(items)).tensors[0]
            decoded = transcribe(self.model, self.data.vocabularies["target"], source, search)
            for item, symbols in zip(items, decoded, strict=True):
                found[item] = symbols
        return found

    def forward_norms(self, model: Any, batch: Batch) -> Tensor:
        """Compute the scores of all target symbols."""
        return model(*self.on_device(batch).tensors[:2])


class MachineTranslation(Translation):
    """`Translation` on a parallel corpus; BLEU as the papers on that corpus compute it."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        metric(data.corpus)  # fails before training if sacrebleu is missing
        references = [lines[1] for lines in data.lines("test")]
        self.outputs["reference"] = [references[item] for item in self._test_items]
        if model.config.mask_logits:
            flat = data.train.target.flat
            model.allow({n for at in range(0, len(flat), CHUNK) for n in np.unique(flat[at : at + CHUNK]).tolist()})

    def describe_data(self) -> dict[str, object]:
        """Return also the sizes of the splits."""
        return {**super().describe_data(), "splits": self.data.facts}

    def rate(self, decoded: list[list[str]]) -> dict[str, float]:
        """Return BLEU with its bootstrap error."""
        self.outputs[self.kind] = lines = [spell(pieces) for pieces in decoded]
        return bleu(lines, self.outputs["reference"], self.data.corpus)

    def score_test(self) -> dict[str, float]:
        """Return also the perplexity with label smoothing, as in Tears' Table 8."""
        smoothed = self.mean_loss(self._test.batches(self.settings.batch_tokens), self.settings.label_smoothing)
        return {**super().score_test(), "smoothed_perplexity": perplexity(smoothed)}

    def validate(self) -> dict[str, float]:
        """Return the loss, and with `valid_bleu` BLEU of the whole validation split."""
        if not self.settings.valid_bleu:
            return super().validate()
        was = self.model.training
        self.model.eval()
        found = [spell(pieces) for pieces in self.decode_all(greedy, self._valid)]
        references = [lines[1] for lines in self.data.lines("valid")]
        scores = bleu(found, references, self.data.corpus, samples=0)
        self.model.train(was)
        return {**super().validate(), "bleu": scores["bleu"]}


def transcribe(model: Any, target: Vocab, source: Tensor, search: Search) -> list[list[str]]:
    """Decode `source [batch, time]` into at most `2 * time + 10` symbols."""
    limit = (2 * (source != PAD).sum(1) + 10).clamp(max=model.config.max_length)
    return [target.decode(sequence) for sequence in search(model, source, limit).sequences]
