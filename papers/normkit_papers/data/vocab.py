"""Vocabularies: symbols and their numbers, and subwords by byte-pair encoding."""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
SPACE = "\u2581"  # begins the first subword of each word


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
        """Return the numbers of the symbols of each line, which are between spaces, without begin and end."""
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
        """Return the vocabulary as JSON values, for `vocabulary`."""
        return self.symbols[len(SPECIAL) :]


class Subwords(Vocab):
    """Subwords and their merges (Sennrich et al. 2016), by the tokenizers library.

    `punctuation` first splits punctuation from words, for text that is not tokenized. Characters that the training text
    did not contain are unknown.

    >>> words = Subwords.learn(["low low lower", "new newer"], 20)
    >>> (lower, q) = words.encode_texts(["lower new", "q"])
    >>> words.text(lower), q[-1] == UNK
    ('lower new', True)
    """

    def __init__(self, symbols: Iterable[str], merges: Iterable[Sequence[str]], punctuation: bool = False):
        super().__init__(symbols)
        self.merges = [(first, second) for first, second in merges]
        if unknown := [pair for pair in self.merges if not {*pair, "".join(pair)} <= self.number.keys()]:
            raise ValueError(f"a merge, {unknown[0]}, has symbols that the vocabulary lacks")
        self.punctuation = punctuation

    @classmethod
    def learn(cls, lines: Iterable[str], size: int, punctuation: bool = False) -> "Subwords":
        """Learn about `size` symbols: all characters, then repeatedly the most frequent pair."""
        learned = _tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNK]), punctuation)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        learned.train_from_iterator((" ".join(line.split()) for line in lines), trainer)
        numbers = learned.get_vocab()
        found = json.loads(learned.to_str())["model"]["merges"]
        merges = [pair for pair in found if not {*pair, "".join(pair)} & {*SPECIAL}]  # "</s>" may be text
        return cls(sorted(numbers, key=numbers.__getitem__)[len(SPECIAL) :], merges, punctuation)

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer of the tokenizers library."""
        model = tokenizers.models.BPE(vocab=self.number, merges=self.merges, unk_token=SPECIAL[UNK])
        return _tokenizer(model, self.punctuation)

    def encode_texts(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the numbers of the subwords of each line, without begin and end."""
        lines = [" ".join(text.split()) for text in texts]
        return [found.ids for found in self.tokenizer.encode_batch_fast(lines, add_special_tokens=False)]

    def text(self, numbers: Iterable[int]) -> str:
        """Return the line that numbers encode, up to the end."""
        return spell(self.decode(numbers))

    def plain(self) -> Any:
        """Return the vocabulary as JSON values, for `vocabulary`."""
        return {"symbols": super().plain(), "merges": self.merges, "punctuation": self.punctuation}


def spell(pieces: Iterable[str]) -> str:
    """Join subwords to a line.

    >>> spell(["▁new", "er", "▁low"])
    'newer low'
    """
    return "".join(pieces).replace(SPACE, " ").strip()


def vocabulary(plain: Any) -> Vocab:
    """Make a vocabulary of what `plain()` returned; ValueError for anything else.

    >>> vocabulary(["a"]).symbols[-1]
    'a'
    """
    symbols = plain.get("symbols") if isinstance(plain, dict) else plain
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
        raise ValueError("not a vocabulary: its symbols must be a list of strings")
    if not isinstance(plain, dict):
        return Vocab(symbols)
    try:
        return Subwords(symbols, plain["merges"], plain["punctuation"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a vocabulary of subwords: {error!r}") from None


def _tokenizer(model: Any, punctuation: bool) -> tokenizers.Tokenizer:
    spaces = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    tokenizer = tokenizers.Tokenizer(model)
    marks = [tokenizers.pre_tokenizers.Punctuation("isolated")] if punctuation else []
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([spaces, *marks])
    return tokenizer
