"""Symbols and their numbers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)


class Vocab:
    """A fixed list of symbols; the first four are padding, begin, end and unknown.

    >>> vocab = Vocab(["a", "b"])
    >>> vocab.encode(["b", "z"]), vocab.decode([1, 5, 2, 4])
    ([5, 3], ['b'])
    """

    def __init__(self, symbols: Iterable[str]):
        self.symbols = [*SPECIAL, *symbols]
        self.number = {symbol: number for number, symbol in enumerate(self.symbols)}
        if len(self.number) != len(self.symbols):
            twice = sorted({s for s in self.symbols if self.symbols.count(s) > 1})
            raise ValueError(f"a vocabulary lists each symbol once; twice or more: {', '.join(twice[:5])}")

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the numbers of symbols, without begin and end."""
        return [self.number.get(symbol, UNK) for symbol in symbols]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the symbols up to the end, without begin and padding."""
        symbols = []
        for number in numbers:
            if number == EOS:
                break
            if number not in (PAD, BOS):
                symbols.append(self.symbols[number])
        return symbols

    def plain(self) -> Any:
        """Return the vocabulary as JSON values."""
        return self.symbols[len(SPECIAL) :]

    @classmethod
    def of(cls, plain: Any) -> "Vocab":
        """Make a vocabulary of what `plain()` returned; ValueError for anything else."""
        if not isinstance(plain, list) or not all(isinstance(s, str) for s in plain):
            raise ValueError("not a vocabulary: it must be a list of strings")
        return Vocab(plain)

    def to_json(self) -> str:
        """Return the vocabulary as JSON text."""
        return json.dumps(self.plain(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Vocab":
        """Read what `to_json` wrote; ValueError for anything else."""
        try:
            symbols = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a vocabulary: {error}") from None
        return cls.of(symbols)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf8")

    @classmethod
    def load(cls, path: str | Path) -> "Vocab":
        """Read a vocabulary from a JSON file."""
        return cls.from_json(Path(path).read_text(encoding="utf8"))
