"""Scores of outputs, by sacrebleu, rapidfuzz and torchmetrics."""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from normkit_papers.data.corpora import Corpus
from normkit_papers.models.torchvision_ops import load_torchvision

SAMPLES = 1000  # of the bootstrap
AP = {
    "map": "ap", "map_50": "ap50", "map_75": "ap75", "map_small": "ap_small", "map_medium": "ap_medium",
    "map_large": "ap_large",
}  # fmt: skip
"""Names in results of torchmetrics' average precisions."""


def bleu(found: Sequence[str], references: Sequence[str], corpus: Corpus, samples: int = SAMPLES) -> dict[str, float]:
    """Return BLEU of translations with one reference each, in the tokenization of the corpus.

    The error is by `samples` resamplings of the sentences (Koehn 2004); 0 for no error.

    Returns:
        "bleu", on the words of a tokenized corpus as multi-bleu.perl, after splitting compounds if the papers do;
        "sacrebleu", with sacrebleu's tokenization (13a) and escapes such as `&apos;` decoded, the same as "bleu" if the
        corpus is not tokenized; "bleu_error", the standard error of "bleu"; "n", the number of sentences.

    Raises:
        ValueError: If the numbers of translations and references differ, or are 0.
    """
    if len(found) != len(references) or not found:
        raise ValueError(f"{len(found)} translations for {len(references)} references; needs one each of at least one")
    how = {"n_bootstrap": samples} if samples else {}
    result = metric(corpus).corpus_score(counted(found, corpus), [counted(references, corpus)], **how)
    plain = _bleu("13a").corpus_score(_unescape(found), [_unescape(references)])
    error = {"bleu_error": float(result._ci) / 1.96} if samples else {}  # sacrebleu returns half of the 95 % interval
    return {"bleu": result.score, "n": len(found), **error, "sacrebleu": plain.score}


def counted(lines: Sequence[str], corpus: Corpus) -> list[str]:
    """Prepare lines for the BLEU of a corpus; compounds are split as by tensor2tensor's get_ende_bleu.sh."""
    if not corpus.tokenized:
        return _unescape(lines)
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) if corpus.compounds else line for line in lines]


def metric(corpus: Corpus) -> Any:
    """Return sacrebleu's metric for `counted` lines."""
    return _bleu("none" if corpus.tokenized else "13a")


def _unescape(lines: Sequence[str]) -> list[str]:
    return [html.unescape(line) for line in lines]


def _bleu(tokenize: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenize, force=True)


def error_rates(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> dict[str, float]:
    """Return symbol and word error rates in percent, by the closest reference of each word.

    Returns:
        `per`, edits per symbol of the closest references, of equally close ones the longest; `wer`, fraction of words
        with an edit; `per_error` and `wer_error`, their sampling errors (one standard deviation, words drawn
        independently); `n`, number of words.

    >>> error_rates([["K", "AE"], ["T", "UW"]], [[["K", "AE", "T"], ["K", "EY"]], [["T", "UW"]]])["per"]
    20.0
    """
    from rapidfuzz.distance import Levenshtein

    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"{len(hypotheses)} hypotheses for {len(references)} words; needs one for each of at least one"
        )
    best = [
        min((Levenshtein.distance(symbols, variant), -len(variant)) for variant in variants)
        for symbols, variants in zip(hypotheses, references, strict=True)
    ]
    edits, lengths = [edits for edits, _ in best], [-length for _, length in best]
    wrong = [float(e > 0) for e in edits]
    n, per, wer = len(edits), sum(edits) / sum(lengths), sum(wrong) / len(edits)
    residual = sum((e - per * length) ** 2 for e, length in zip(edits, lengths, strict=True))
    return {
        "per": 100 * per,
        "per_error": 100 * math.sqrt(residual / n) / (sum(lengths) / n) / math.sqrt(n),
        "wer": 100 * wer,
        "wer_error": 100 * math.sqrt(wer * (1 - wer) / n),
        "n": n,
    }


def precision_metric(masks: bool) -> Any:
    """Return torchmetrics' average precision of boxes and, with `masks`, of masks, as COCO computes it."""
    load_torchvision()  # torchmetrics imports it
    from torchmetrics.detection import MeanAveragePrecision

    kinds: Any = ("bbox", "segm") if masks else "bbox"
    overlaps, recalls = np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0, 1, 101).tolist()  # its own are in float32
    return MeanAveragePrecision("xyxy", kinds, overlaps, recalls, backend="pycocotools", sync_on_compute=False)


def average_precision(metric: Any) -> dict[str, float]:
    """Return average precision in percent: `box_ap`, `box_ap50`, ..., `mask_ap`, ....

    Small objects are below 32 x 32 pixels, large ones above 96 x 96; a size that no object has is left out.

    Args:
        metric: What `precision_metric` made, after it has seen all images.
    """
    found = metric.compute()
    kinds = {"bbox_": "box", "segm_": "mask"} if "bbox_map" in found else {"": "box"}
    return {
        f"{name}_{AP[part]}": 100 * float(found[f"{kind}{part}"])
        for kind, name in kinds.items()
        for part in AP
        if found[f"{kind}{part}"] >= 0
    }
