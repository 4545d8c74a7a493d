"""Byte-pair encoding: a vocabulary of subwords, learned from text."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from normkit_papers.data.vocab import SPECIAL, UNK, Vocab

SPACE = "\u2581"  # begins the first subword of each word


class Subwords(Vocab):
    """Subwords and their merges (Sennrich et al. 2016), by the tokenizers library.

    `punctuation` first splits punctuation from words, for text that is not tokenized. Characters that the training text
    did not contain are unknown.

    >>> words = Subwords.learn(["low low lower", "new newer"], 20)
    >>> words.text(words.encode_text("lower new")), words.encode_text("q")[-1] == UNK
    ('lower new', True)
    """

    def __init__(self, symbols: Iterable[str], merges: Iterable[Sequence[str]], punctuation: bool = False):
        super().__init__(symbols)
        self.merges = [(first, second) for first, second in merges]
        known = self.number.keys()
        if unknown := [pair for pair in self.merges if not {*pair, "".join(pair)} <= known]:
            raise ValueError(f"a merge, {unknown[0]}, has symbols that the vocabulary lacks")
        self.punctuation = punctuation

    @classmethod
    def learn(cls, lines: Iterable[str], size: int, punctuation: bool = False) -> "Subwords":
        """Learn about `size` symbols: all characters, then repeatedly the most frequent pair."""
        if size < 1:
            raise ValueError(f"a vocabulary of subwords needs at least 1 symbol; got {size}")
        learned = _tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNK]), punctuation)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        learned.train_from_iterator((" ".join(line.split()) for line in lines), trainer)
        numbers = learned.get_vocab()
        symbols = sorted(numbers, key=lambda symbol: numbers[symbol])
        found = json.loads(learned.to_str())["model"]["merges"]
        merges = [pair for pair in found if not {*pair, "".join(pair)} & {*SPECIAL}]  # "</s>" may be text
        return cls(symbols[len(SPECIAL) :], merges, punctuation)

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer of the tokenizers library."""
        model = tokenizers.models.BPE(vocab=self.number, merges=self.merges, unk_token=SPECIAL[UNK])
        return _tokenizer(model, self.punctuation)

    def encode_text(self, text: str) -> list[int]:
        """Return the numbers of the subwords of a line, without begin and end."""
        return self.encode_texts([text])[0]

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
