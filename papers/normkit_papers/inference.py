"""Use trained models: translate lines, pronounce words."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from normkit_papers.data.batches import pad
from normkit_papers.data.vocab import EOS, UNK, Subwords, Vocab, spell
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.train.config import PairRun
from normkit_papers.train.decode import beam_search
from normkit_papers.train.folder import load
from normkit_papers.train.translation import transcribe


def translate_lines(
    folder: Path, lines: Iterable[str], warn: Callable[[str], object] = lambda text: None
) -> Iterator[str]:
    """Translate lines with a trained model; an empty line stays empty.

    A model of subwords takes text that is tokenized and cased as its corpus is; another one a sequence a line: symbols
    between spaces, or a word. `warn` is called with a message for each line that is mostly unknown.

    Raises:
        ValueError: If the model cannot take a line; the message has the line's number.
    """
    run, model, vocabularies = load(folder)
    if not (isinstance(run, PairRun) and isinstance(model, Seq2Seq)):
        raise ValueError(f"{folder} is a run of task {run.task}, which rewrites nothing; name a run of task g2p or mt")
    source, target, search = vocabularies["source"], vocabularies["target"], beam_search(run)
    for number, line in enumerate(lines, 1):
        try:
            pieces = _encode(source, line) if line.strip() else []
            if 2 * pieces.count(UNK) > len(pieces):
                warn(f"line {number} is mostly unknown to the model; is it in its language and script?")
            if len(pieces) >= model.config.max_length:
                raise ValueError(f"{len(pieces)} symbols are too long for the model's {model.config.max_length}")
            found = transcribe(model, target, pad([[*pieces, EOS]]), search)[0] if pieces else []
            yield spell(found) if isinstance(source, Subwords) else " ".join(found)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _encode(source: Vocab, line: str) -> list[int]:
    if isinstance(source, Subwords):
        return source.encode_texts([line])[0]
    symbols = line.split()
    if UNK in source.encode(symbols):  # a word in place of symbols
        symbols = list(line.strip().lower())
    numbers = source.encode(symbols)
    if UNK in numbers:
        raise ValueError(
            f"{symbols[numbers.index(UNK)]!r} is none of the model's symbols, {' '.join(source.symbols[4:])}"
        )
    return numbers
