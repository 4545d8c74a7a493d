"""Error rates of transcriptions, against a slow edit distance."""

import pytest
import torch
from normkit_papers.train.error_rates import error_rates


def edits(a, b):
    """Levenshtein distance, the slow way."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, old = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(old[j] + 1, row[-1] + 1, old[j - 1] + (x != y)))
    return row[-1]


def test_error_rates_are_those_of_the_closest_reference():
    generator = torch.Generator().manual_seed(0)

    def word(least):
        size = int(torch.randint(least, 7, (), generator=generator))
        return ["ABC"[k] for k in torch.randint(3, (size,), generator=generator).tolist()]

    hypotheses = [word(0) for _ in range(200)]
    references = [[word(1) for _ in range(1 + k % 3)] for k in range(200)]
    score = error_rates(hypotheses, references)
    best = [
        min((edits(hypothesis, variant), -len(variant)) for variant in variants)
        for hypothesis, variants in zip(hypotheses, references, strict=True)
    ]
    assert score["per"] == pytest.approx(100 * sum(e for e, _ in best) / -sum(n for _, n in best))
    assert score["wer"] == pytest.approx(100 * sum(e > 0 for e, _ in best) / 200)
    assert score["n"] == 200


def test_sampling_error_is_the_spread_of_samples():
    generator = torch.Generator().manual_seed(1)
    wrong = (torch.rand(40, 250, generator=generator) < 0.2).tolist()
    rates = [error_rates([["A"] if w else ["B"] for w in sample], [[["B"]]] * 250) for sample in wrong]
    spread = torch.tensor([rate["per"] for rate in rates]).std().item()
    assert rates[0]["per_error"] == pytest.approx(spread, rel=0.35)
    assert rates[0]["wer_error"] == pytest.approx(spread, rel=0.35)


def test_error_rates_refuse_what_cannot_be_compared():
    with pytest.raises(ValueError, match="2 hypotheses for 1 words"):
        error_rates([["A"], ["B"]], [[["A"]]])
