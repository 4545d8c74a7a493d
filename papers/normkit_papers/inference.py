"""Use trained models: pronounce words, translate lines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from normkit._util import truncate
from normkit.norms import StatNorm
from normkit_papers.data.batches import pad
from normkit_papers.data.subwords import Subwords, spell
from normkit_papers.data.vocab import EOS, UNK, Vocab
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.report import results
from normkit_papers.train.config import Run
from normkit_papers.train.decode import beam_search
from normkit_papers.train.folder import load
from normkit_papers.train.translation import transcribe


def best(folder: Path) -> Path:
    """Find the run with the lowest phoneme error rate in a folder.

    Raises:
        ValueError: If the folder holds no finished run of task g2p.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; train with `normkit demo` first, or name a run with --run")
    scored = {run: result["scores"] for run, result in results.find([folder]).items() if result["scores"]}
    if not scored:
        raise ValueError(f"no run in {folder} was finished; name another one with --run")
    rates = {run: scores.get("beam", scores["running"]).get("per") for run, scores in scored.items()}
    rates = {run: rate for run, rate in rates.items() if rate is not None}
    if not rates:
        raise ValueError(f"no run in {folder} turns spelling into sound; name a run of task g2p with --run")
    return min(rates, key=lambda run: rates[run])


def pronounce(folder: Path, words: Sequence[str]) -> list[list[str]]:
    """Predict the sounds of words with a trained model.

    Raises:
        ValueError: If a word has a letter that is not in the model's vocabulary, or the model is damaged.
    """
    run, model, source, target = _load(folder)
    return _rewrite(run, model, target, [_encode(source, list(word.lower())) for word in words])


def translate_lines(
    folder: Path, lines: Iterable[str], warn: Callable[[str], object] = lambda text: None
) -> Iterator[str]:
    """Translate lines with a trained model; an empty line stays empty.

    A model of subwords takes text that is tokenized and cased as its corpus is.

    Args:
        folder: Folder of the run.
        lines: Lines of text; for other models, a sequence a line: symbols of the model between spaces, or a word.
        warn: Called with a message for each line that is mostly unknown to the model.

    Raises:
        ValueError: If the model cannot take a line; the message has the line's number.
    """
    run, model, source, target = _load(folder)
    for number, line in enumerate(lines, 1):
        try:
            if not line.strip():
                yield ""
            elif isinstance(source, Subwords):
                pieces = source.encode_text(line)
                if 2 * pieces.count(UNK) > len(pieces):
                    warn(f"line {number} is mostly unknown to the model; is it in its language and script?")
                yield spell(_rewrite(run, model, target, [pieces])[0])
            else:
                symbols = line.split()
                symbols = list(line.strip().lower()) if UNK in source.encode(symbols) else symbols
                yield " ".join(_rewrite(run, model, target, [_encode(source, symbols)])[0])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _load(folder: Path) -> tuple[Run, Seq2Seq, Vocab, Vocab]:
    run, model, vocabularies = load(folder)
    if not isinstance(model, Seq2Seq):
        raise ValueError(f"{folder} is a run of task {run.task}, which rewrites nothing; name a run of task g2p or mt")
    _check_finite(model, folder)
    return run, model, vocabularies["source"], vocabularies["target"]


def _check_finite(model: Seq2Seq, folder: Path) -> None:
    """Raise ValueError for weights that are not finite and for negative statistics."""
    tensors = dict(model.state_dict())
    norms = {name: module for name, module in model.named_modules() if isinstance(module, StatNorm)}
    tensors |= {f"statistics of {name}": norm.split().scale for name, norm in norms.items()}  # NaN for a root of < 0
    damaged = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if damaged:
        raise ValueError(
            f"{folder / 'model.safetensors'} is damaged: a weight is not finite, or a statistic is "
            f"not finite or negative: {', '.join(truncate(damaged, 3))}; train the run again, or take another one"
        )


def _encode(source: Vocab, symbols: list[str]) -> list[int]:
    numbers = source.encode(symbols)
    if UNK in numbers or not numbers:
        unknown = [symbol for symbol, number in zip(symbols, numbers, strict=True) if number == UNK]
        what = f"{unknown[0]!r} in {''.join(symbols)!r}" if unknown else "an empty word"
        raise ValueError(f"{what} is not in the vocabulary of the model, which is {' '.join(source.symbols[4:])}")
    return numbers


def _rewrite(run: Run, model: Seq2Seq, target: Vocab, items: list[list[int]]) -> list[list[str]]:
    encoded = [[*numbers, EOS] for numbers in items]
    if (longest := max(map(len, encoded))) > model.config.max_length:
        raise ValueError(f"{longest} symbols are longer than the model's max_length={model.config.max_length}")
    return transcribe(model, target, pad(encoded), beam_search(run))
