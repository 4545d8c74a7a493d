"""Scores of outputs: BLEU by sacrebleu, error rates by jiwer, average precision by pycocotools."""

import contextlib
import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normkit_papers.data.corpora import Corpus

SAMPLES = 1000  # of the bootstrap
AP = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
COCO_KEYS = {
    "bbox": ("image_id", "category_id", "bbox", "score"),
    "segm": ("image_id", "category_id", "segmentation", "score"),
}


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

    Args:
        hypotheses: Symbols of each word.
        references: All correct transcriptions of each word. Of those equally close, the longest one counts.

    Returns:
        `per`, edits per symbol of the closest references; `wer`, fraction of words with an edit; `per_error` and
        `wer_error`, their sampling errors (one standard deviation, words drawn independently); `n`, number of words.

    >>> error_rates([["K", "AE"], ["T", "UW"]], [[["K", "AE", "T"], ["K", "EY"]], [["T", "UW"]]])["per"]
    20.0
    """
    import jiwer

    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"{len(hypotheses)} hypotheses for {len(references)} words; needs one for each of at least one"
        )
    owner = [word for word, variants in enumerate(references) for _ in variants]
    flat = [" ".join(variant) for variants in references for variant in variants]
    aligned = jiwer.process_words(flat, [" ".join(hypotheses[word]) for word in owner])
    best: dict[int, tuple[int, int]] = {}
    for word, reference, chunks in zip(owner, aligned.references, aligned.alignments, strict=True):
        sides = (
            (c.ref_end_idx - c.ref_start_idx, c.hyp_end_idx - c.hyp_start_idx) for c in chunks if c.type != "equal"
        )
        found = sum(map(max, sides)), -len(reference)
        best[word] = min(best.get(word, found), found)
    edits, lengths = ([sign * best[word][at] for word in range(len(references))] for at, sign in ((0, 1), (1, -1)))
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


def coco_results(number: int, categories: Sequence[int], detections: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the detections of an image as rows of COCO's result format.

    Args:
        number: COCO's number of the image.
        categories: COCO's numbers of the labels 1, 2, ....
        detections: Output of a torchvision detector; boxes in pixels, masks as probabilities.
    """
    import numpy as np
    from pycocotools import mask

    rows = []
    boxes = detections["boxes"].double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    labels, scores = detections["labels"].tolist(), detections["scores"].tolist()
    for box, label, score in zip(boxes.tolist(), labels, scores, strict=True):
        rows.append({"image_id": number, "category_id": categories[label - 1], "bbox": box, "score": score})
    if "masks" in detections:
        solid = (detections["masks"][:, 0] > 0.5).byte().cpu().permute(1, 2, 0).numpy()
        for row, lengths in zip(rows, mask.encode(np.asfortranarray(solid)), strict=True):
            row["segmentation"] = lengths
    return rows


def average_precision(
    truth: dict[str, Any], rows: list[dict[str, Any]], masks: bool, images: Sequence[int] | None = None
) -> dict[str, float]:
    """Return average precision in percent: `box_ap`, `box_ap50`, ..., `mask_ap`, ....

    Small objects are below 32 x 32 pixels, large ones above 96 x 96; a size that the truth does not contain is left
    out.

    Args:
        truth: COCO's JSON of the scored images.
        rows: Rows of `coco_results`.
        masks: Score masks too.
        images: COCO's numbers of the images to score; by default all.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    out: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints timings
        reference = COCO()
        reference.dataset = truth  # type: ignore[assignment]
        reference.createIndex()
        for kind, prefix in (("bbox", "box"), ("segm", "mask"))[: 1 + masks]:
            boxes = [{key: row[key] for key in row if key in COCO_KEYS[kind]} for row in rows]
            found = reference.loadRes(boxes) if rows else COCO()  # type: ignore[arg-type]
            evaluation = COCOeval(reference, found, kind)  # type: ignore[arg-type]
            if images is not None:
                evaluation.params.imgIds = list(images)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            values = zip(AP, evaluation.stats[: len(AP)].tolist(), strict=True)
            out |= {f"{prefix}_{name}": 100 * value for name, value in values if value >= 0}
    return out
