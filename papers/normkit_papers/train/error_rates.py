"""Error rates of transcriptions with several references, by jiwer."""

import math
from collections.abc import Sequence

Symbols = Sequence[str]


def error_rates(hypotheses: Sequence[Symbols], references: Sequence[Sequence[Symbols]]) -> dict[str, float]:
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
        edits = sum(
            max(c.ref_end_idx - c.ref_start_idx, c.hyp_end_idx - c.hyp_start_idx) for c in chunks if c.type != "equal"
        )
        best[word] = min(best.get(word, (edits, -len(reference))), (edits, -len(reference)))
    edits = [best[word][0] for word in range(len(references))]
    lengths = [-best[word][1] for word in range(len(references))]
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
