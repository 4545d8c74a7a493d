"""BLEU as the papers count it, by sacrebleu, with bootstrap; two systems compared on the same sentences."""

import html
import re
from collections.abc import Sequence
from typing import Any

from normkit.lab.data.corpora import Corpus

SAMPLES = 1000  # of the bootstrap


def bleu(found: Sequence[str], references: Sequence[str], corpus: Corpus, samples: int = SAMPLES) -> dict[str, float]:
    """BLEU of translations, a reference each: "bleu", its standard error "bleu_error", "sacrebleu", "n" sentences.

    "bleu" is counted on words as they stand where the corpus is tokenized, as by multi-bleu.perl, after splitting
    compounds where the papers do; "sacrebleu" with sacrebleu's own tokenization (13a), escapes such as `&apos;` undone.
    They are the same where the corpus is not tokenized. The error is that of `samples` resamplings of the sentences
    (Koehn 2004); 0 leaves it out.
    """
    if len(found) != len(references) or not found:
        raise ValueError(f"{len(found)} translations for {len(references)} references; needs one each of at least one")
    result = metric(corpus).corpus_score(
        counted(found, corpus), [counted(references, corpus)], **({"n_bootstrap": samples} if samples else {})
    )
    scores = {"bleu": result.score, "n": len(found)}
    if samples:  # sacrebleu tells half of the 95 % interval that the samples span
        scores["bleu_error"] = float(result._ci) / 1.96
    scores["sacrebleu"] = _bleu("13a").corpus_score(_plain(found), [_plain(references)]).score
    return scores


def counted(lines: Sequence[str], corpus: Corpus) -> list[str]:
    """Lines as the BLEU of a corpus takes them."""
    if not corpus.tokenized:
        return _plain(lines)
    return [split_compounds(line) for line in lines] if corpus.compounds else list(lines)


def metric(corpus: Corpus) -> Any:
    """Sacrebleu's metric for lines that are `counted`."""
    return _bleu("none" if corpus.tokenized else "13a")


def split_compounds(line: str) -> str:
    """Compounds split at hyphens, as in tensor2tensor's get_ende_bleu.sh.

    >>> split_compounds("a well-known - fact")
    'a well ##AT##-##AT## known - fact'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def _plain(lines: Sequence[str]) -> list[str]:
    return [html.unescape(line) for line in lines]


def _bleu(tokenize: str) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise ModuleNotFoundError(
            "BLEU needs the package sacrebleu, which is not installed; pip install 'normkit[text]'"
        ) from None
    return BLEU(tokenize=tokenize, force=True)
