"""Translation of text in subwords, scored by BLEU."""

import numpy as np

from normkit_papers.data.subwords import spell
from normkit_papers.tasks import perplexity
from normkit_papers.train.bleu import bleu, metric
from normkit_papers.train.decode import greedy
from normkit_papers.train.pairs import PairTable
from normkit_papers.train.translation import Translation

CHUNK = 2**24  # subwords read at once; a corpus is mapped from a file and may be larger than memory


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

    def splits(self) -> tuple[PairTable, PairTable, PairTable]:
        """Return the splits; training pairs longer than the model's max_length are left out."""
        longest, data = self.settings.model.max_length, self.data
        train, valid, test = (PairTable(*split) for split in (data.train, data.valid, data.test))
        short = np.flatnonzero((train.both <= longest).all(1))
        for name, table in (("valid", valid), ("test", test)):
            if int(table.both.max()) > longest:
                line = int(table.both.max(1).argmax()) + 1
                raise ValueError(
                    f"line {line} of the {name} split of {data.name} has {int(table.both.max())} subwords, more than "
                    f"max_length={longest}; raise --model.max-length"
                )
        if not len(short):
            raise ValueError(f"no pair of {data.name} is within max_length={longest}; raise --model.max-length")
        return train if len(short) == len(train) else train.take(short), valid, test

    def describe_data(self) -> dict[str, object]:
        """Return sizes of the splits, and the number of training pairs left out."""
        left_out = len(self.data.train) - len(self._train)
        return {"name": self.data.name, "splits": self.data.facts, "left_out": left_out}

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
