"""Batches of a text for a model of Hugging Face, in mixed lengths."""

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = 1024  # of a batch of training, with padding
ROWS = 4  # of a batch at least
SHORTEST = 8  # tokens
RUN, PARTS = 20, 10  # every tenth run of 20 lines is held out
PER_TOKEN = 4.0  # characters


def read_text(name: str | Path, option: str = "--text") -> list[str]:
    """Return the lines of a file, or of the training split of a data set of the Hub.

    Args:
        name: A file with one text a line, or a data set as "org/name" or "org/name:config".
        option: What gives the name, for errors.

    Raises:
        ValueError: If it is neither.
    """
    if (path := Path(name)).is_file():
        try:
            return [line for line in path.read_text(encoding="utf8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{option} {path} is no text in UTF-8 ({error}); convert it") from None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(name)) or path.is_dir():
        raise ValueError(
            f"{option} {name} is no file; give a file with one text a line, or a data set of the Hub as org/name or "
            "org/name:config, which needs `pip install datasets`"
        )
    import datasets

    rows = datasets.load_dataset(*str(name).split(":"), split="train")
    column = next((key for key, kind in rows.features.items() if getattr(kind, "dtype", "") == "string"), None)
    if column is None:
        raise ValueError(f"{option} {name} has no column of text; write its text into a file, one a line")
    return [line for text in rows[column] for line in text.splitlines() if line.strip()]


def split(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return lines to train on, and held-out ones.

    Every tenth run of 20 lines is held out; of fewer than 200 lines the last tenth.
    """
    if len(lines) < RUN * PARTS:
        kept = len(lines) - math.ceil(len(lines) / PARTS)
        return lines[:kept], lines[kept:]
    held_out = [number // RUN % PARTS == PARTS - 1 for number in range(len(lines))]
    return [line for line, out in zip(lines, held_out, strict=True) if not out], [
        line for line, out in zip(lines, held_out, strict=True) if out
    ]


class Texts:
    """Lines as batches of tokens.

    A causal model gets windows of the whole text, without padding. Other models get whole sentences, several joined
    where a text shall be long.

    Args:
        lines: Lines of text.
        tokenizer: A tokenizer of transformers.
        length: Most tokens of a text.
        causal: True for a causal language model.
        device: Device of the batches.
        name: What it is, for errors.

    Raises:
        ValueError: If there are too few lines for a batch.
    """

    def __init__(
        self, lines: list[str], tokenizer: Any, length: int, causal: bool, device: str = "cpu", name: str = "the text"
    ) -> None:  # fmt: skip
        self.tokenizer, self.length, self.causal, self.device = tokenizer, length, causal, device
        if causal:
            self.begin = tokenizer("")["input_ids"]  # the tokens that it puts before every text
            self.added = bool(self.begin)
            self.items: Any = tokenizer("\n".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
        else:
            self.items = [part for line in lines for part in re.split(r"(?<=[.!?])\s+", line.strip()) if part]
        needed = length + 1 if causal else ROWS
        if len(self.items) < needed:
            unit = "token(s)" if causal else "sentence(s)"
            raise ValueError(f"{name} has {len(self.items)} {unit}, and {needed} are needed; give more lines")

    def training(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches without end, each of texts of about one length between 8 tokens and the longest."""
        chance = random.Random(seed)
        low, high = math.log(min(SHORTEST, self.length)), math.log(self.length)
        while True:
            length = round(math.exp(chance.uniform(low, high)))
            yield self._batch(chance, length, max(ROWS, TOKENS // length))

    def of_length(self, length: int, count: int) -> list[dict[str, Tensor]]:
        """Return batches of `count` texts of about a length, the same at each call."""
        chance = random.Random(length)
        rows = max(ROWS, TOKENS // length)
        return [self._batch(chance, length, min(rows, count - at)) for at in range(0, count, rows)]

    def _batch(self, chance: random.Random, length: int, rows: int) -> dict[str, Tensor]:
        if self.causal:
            size = length - len(self.begin)
            starts = [chance.randrange(max(len(self.items) - size, 1)) for _ in range(rows)]
            ids = torch.tensor([self.begin + self.items[start : start + size] for start in starts])
            return {"input_ids": ids.to(self.device)}
        texts = [self._sentences(chance.randrange(len(self.items)), length * PER_TOKEN) for _ in range(rows)]
        most = min(self.length, 2 * length)
        found = self.tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
        return {key: found[key].to(self.device) for key in ("input_ids", "attention_mask")}

    def _sentences(self, start: int, characters: float) -> str:
        """Join sentences from one on, up to about a number of characters; one at least."""
        joined = self.items[start]
        for at in range(start + 1, len(self.items)):
            if len(joined) + len(self.items[at]) / 2 > characters:
                break
            joined = f"{joined} {self.items[at]}"
        return joined
