"""Use trained models: pronounce words, translate lines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from normkit.lab.data.batches import pad
from normkit.lab.data.subwords import Subwords
from normkit.lab.data.vocab import EOS, UNK, Vocab
from normkit.lab.models.mt import Seq2Seq
from normkit.lab.report import results
from normkit.lab.train.config import Run
from normkit.lab.train.decode import beam
from normkit.lab.train.run import load


def best(folder: Path) -> Path:
    """The run with the lowest phoneme error rate among those in a folder; ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"there is no {folder}; train with `normkit demo` first, or name a run with --run")
    scored = {where: result["scores"] for where, result in results.find([folder]).items() if result["scores"]}
    if not scored:
        raise ValueError(f"no run in {folder} was finished; name another one with --run")
    rates = {where: scores.get("beam", scores["running"]).get("per") for where, scores in scored.items()}
    rates = {where: rate for where, rate in rates.items() if rate is not None}
    if not rates:
        raise ValueError(f"no run in {folder} turns spelling into sound; name a run of task g2p with --run")
    return min(rates, key=lambda where: rates[where])


def pronounce(folder: Path, words: Sequence[str]) -> list[list[str]]:
    """Sounds of each word, by the model of a run; ValueError for a letter that it does not know."""
    run, model, source, target = _load(folder)
    found = _search(run, model, [_known(source, list(word.lower())) for word in words])
    return [target.decode(sequence) for sequence in found]


def translate_lines(
    folder: Path, lines: Iterable[str], tell: Callable[[str], object] = lambda said: None
) -> Iterator[str]:
    """Each line as the model of a run rewrites it; an empty line stays empty. ValueError, with its number, for a line
    that the model cannot take.

    A model of subwords reads text that is tokenized and cased as its corpus is; an unknown character is left unknown,
    and `tell` hears of lines that are mostly unknown.
    """
    run, model, source, target = _load(folder)
    for number, line in enumerate(lines, 1):
        try:
            if not line.strip():
                yield ""
            elif isinstance(source, Subwords) and isinstance(target, Subwords):
                pieces = source.encode_text(line)
                if 2 * pieces.count(UNK) > len(pieces):
                    tell(f"line {number} is mostly unknown to the model; is it in its language and script?")
                yield target.text(_search(run, model, [pieces])[0])
            else:
                yield " ".join(target.decode(_search(run, model, [_known(source, list(line.strip().lower()))])[0]))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _load(folder: Path) -> tuple[Run, Seq2Seq, Vocab, Vocab]:
    run, model, vocabularies = load(folder)
    if not isinstance(model, Seq2Seq):
        raise ValueError(f"{folder} is a run of task {run.task}, which rewrites nothing; name a run of task g2p or mt")
    return run, model, vocabularies["source"], vocabularies["target"]


def _known(source: Vocab, symbols: list[str]) -> list[int]:
    numbers = source.encode(symbols)
    if UNK in numbers or not numbers:
        unknown = [symbol for symbol, number in zip(symbols, numbers, strict=True) if number == UNK]
        what = f"{unknown[0]!r} in {''.join(symbols)!r}" if unknown else "an empty word"
        raise ValueError(f"the model does not know {what}; it knows {' '.join(source.symbols[4:])}")
    return numbers


@torch.no_grad()
def _search(run: Run, model: Seq2Seq, items: list[list[int]]) -> list[list[int]]:
    encoded = [[*numbers, EOS] for numbers in items]
    if (longest := max(map(len, encoded))) > model.config.max_length:
        raise ValueError(f"{longest} symbols are longer than the model's max_length={model.config.max_length}")
    limit = torch.tensor([2 * len(numbers) + 10 for numbers in encoded]).clamp(max=model.config.max_length)
    return beam(model, pad(encoded), run.beam, run.length_penalty, limit, run.length_offset).sequences
