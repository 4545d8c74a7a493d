"""BLEU as the papers compute it, by sacrebleu, with a bootstrap error."""

import html
import re
from collections.abc import Sequence
from typing import Any

from normkit_papers.data.corpora import Corpus

SAMPLES = 1000  # of the bootstrap


def bleu(found: Sequence[str], references: Sequence[str], corpus: Corpus, samples: int = SAMPLES) -> dict[str, float]:
    """Return BLEU of translations with one reference each.

    Args:
        found: Translations.
        references: One reference for each.
        corpus: Its tokenization decides how words are counted.
        samples: Resamplings of the sentences for the error (Koehn 2004); 0 for no error.

    Returns:
        "bleu", on the words of a tokenized corpus as multi-bleu.perl, after splitting compounds if the papers do;
        "sacrebleu", with sacrebleu's tokenization (13a) and escapes such as `&apos;` decoded, the same as "bleu" if the
        corpus is not tokenized; "bleu_error", the standard error of "bleu"; "n", the number of sentences.

    Raises:
        ValueError: If the numbers of translations and references differ, or are 0.
    """
    if len(found) != len(references) or not found:
        raise ValueError(f"{len(found)} translations for {len(references)} references; needs one each of at least one")
    result = metric(corpus).corpus_score(
        counted(found, corpus), [counted(references, corpus)], **({"n_bootstrap": samples} if samples else {})
    )
    scores = {"bleu": result.score, "n": len(found)}
    if samples:  # sacrebleu returns half of the 95 % interval
        scores["bleu_error"] = float(result._ci) / 1.96
    scores["sacrebleu"] = _bleu("13a").corpus_score(_unescape(found), [_unescape(references)]).score
    return scores


def counted(lines: Sequence[str], corpus: Corpus) -> list[str]:
    """Prepare lines for the BLEU of a corpus."""
    if not corpus.tokenized:
        return _unescape(lines)
    return [split_compounds(line) for line in lines] if corpus.compounds else list(lines)


def metric(corpus: Corpus) -> Any:
    """Return sacrebleu's metric for `counted` lines."""
    return _bleu("none" if corpus.tokenized else "13a")


def split_compounds(line: str) -> str:
    """Split compounds at hyphens, as tensor2tensor's get_ende_bleu.sh.

    >>> split_compounds("a well-known - fact")
    'a well ##AT##-##AT## known - fact'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def _unescape(lines: Sequence[str]) -> list[str]:
    return [html.unescape(line) for line in lines]


def _bleu(tokenize: str) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise ModuleNotFoundError(
            "BLEU needs the package sacrebleu, which is not installed; pip install 'normkit[text]'"
        ) from None
    return BLEU(tokenize=tokenize, force=True)
