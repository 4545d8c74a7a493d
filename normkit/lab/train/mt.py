"""Translation of text in subwords: scored by BLEU."""

import math

import numpy as np

from normkit.lab.data.subwords import spell
from normkit.lab.train.bleu import bleu, metric
from normkit.lab.train.decode import greedy
from normkit.lab.train.pairs import Table
from normkit.lab.train.translation import Translation

PART = 2**24  # subwords looked at together


class MachineTranslation(Translation):
    """As `Translation`, on a parallel corpus; BLEU on what the corpus' papers count it on."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        metric(data.corpus)  # where its package is missing, that is known before training
        references = [lines[1] for lines in data.lines("test")]
        self.outputs["reference"] = [references[item] for item in self._asked]
        if model.config.mask_logits:
            flat = data.train.target.flat  # mapped from a file, and may be larger than memory
            model.allow({n for at in range(0, len(flat), PART) for n in np.unique(flat[at : at + PART]).tolist()})

    def tables(self) -> tuple[Table, Table, Table]:
        """The splits; training pairs that are longer than the model's max_length are left out."""
        longest, data = self.settings.model.max_length, self.data
        train, valid, test = (Table(*split) for split in (data.train, data.valid, data.test))
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

    def facts(self) -> dict[str, object]:
        """What was trained on: sizes, and what was left out."""
        left_out = len(self.data.train) - len(self._train)
        return {"name": self.data.name, "splits": self.data.facts, "left_out": left_out}

    def rates(self, found: dict[int, list[str]]) -> dict[str, float]:
        """BLEU with its bootstrap error."""
        lines = [spell(found[item]) for item in range(len(found))]
        self.outputs[self.kind] = lines
        return bleu(lines, self.outputs["reference"], self.data.corpus)

    def score_greedy(self) -> dict[str, float]:
        """Also the perplexity of the test split with label smoothing, beside the training's in Tears' Table 8."""
        smoothed = self.mean_loss(self._test.batches(self.settings.batch_tokens), self.settings.label_smoothing)
        return {**super().score_greedy(), "smoothed_perplexity": math.exp(min(smoothed, 700.0))}

    def look(self) -> dict[str, float]:
        """Loss of the validation split, and BLEU of greedy search in all of it where the run asks for that."""
        if not self.settings.valid_bleu:
            return super().look()
        self.model.eval()
        found = self.search_all(greedy, self._valid)
        references = [lines[1] for lines in self.data.lines("valid")]
        scores = bleu([spell(found[item]) for item in range(len(found))], references, self.data.corpus, samples=0)
        self.model.train()
        return {**super().look(), "bleu": scores["bleu"]}
