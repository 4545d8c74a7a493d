"""Symbols and their numbers."""

from collections import Counter
from collections.abc import Iterable
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
            twice = sorted(symbol for symbol, count in Counter(self.symbols).items() if count > 1)
            raise ValueError(f"a vocabulary lists each symbol once; twice or more: {', '.join(twice[:5])}")

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the numbers of symbols, without begin and end."""
        number = self.number.get
        return [number(symbol, UNK) for symbol in symbols]

    def encode_texts(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the numbers of the symbols of each line, which are between spaces."""
        return [self.encode(text.split()) for text in texts]

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
