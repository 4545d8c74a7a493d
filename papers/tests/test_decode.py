"""Greedy and beam search against each other and against trying everything."""

import functools
import itertools

import pytest
import torch
from normkit_papers.data.vocab import BOS, EOS, PAD
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.train.decode import beam, greedy
from test_models import SMALL, SOURCE, seq2seq

MANY = torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 0, 0], [5, 2, 0, 0, 0], [9, 8, 7, 2, 0], [6, 6, 6, 6, 2]])


@pytest.mark.parametrize("search", [greedy, functools.partial(beam, width=3)])
def test_a_sentence_decodes_the_same_alone_and_in_a_batch(search):
    model = seq2seq(seed=1)
    together = search(model, MANY, 8)
    for i, row in enumerate(MANY):
        alone = search(model, row[row != PAD][None], 8)
        assert alone.sequences[0] == together.sequences[i]
        assert alone.scores[0] == pytest.approx(together.scores[i], abs=1e-4)


@torch.no_grad()
def log_p(model: Seq2Seq, source: torch.Tensor, sequence: tuple[int, ...]) -> float:
    """The log probability of a sequence, teacher-forced, padding and begin ruled out."""
    scores = model(source, torch.tensor([[BOS, *sequence[:-1]]]))[0]
    scores[:, [PAD, BOS]] = -torch.inf
    return float(scores.log_softmax(-1).double()[range(len(sequence)), list(sequence)].sum())


@pytest.mark.parametrize(("penalty", "offset"), [(0.0, 5), (0.6, 5), (1.0, 5), (1.0, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_that_holds_everything_finds_the_best(penalty, offset, seed):
    torch.manual_seed(seed)
    model = Seq2Seq(SMALL, 10, 6).eval()  # the end, unknown and two words: 3 ** n ways on
    source, longest = SOURCE[:1], 4
    words = [3, 4, 5]
    ended = [(*body, EOS) for n in range(longest) for body in itertools.product(words, repeat=n)]
    value = {s: log_p(model, source, s) / ((offset + len(s)) / (offset + 1)) ** penalty for s in ended}
    best = max(value, key=value.__getitem__)
    found = beam(model, source, longest, width=100, length_penalty=penalty, length_offset=offset)
    assert found.sequences[0] == list(best[:-1])
    assert found.scores[0] == pytest.approx(value[best], abs=1e-4)


def test_length_limits_hold_for_each_sentence():
    model = seq2seq(seed=0)
    with torch.no_grad():
        model.output.linear.bias[EOS] = -50.0  # never ends by itself
    limits = torch.tensor([1, 2, 3, 4, 5])
    assert [len(s) for s in greedy(model, MANY, limits).sequences] == [1, 2, 3, 4, 5]
    found = beam(model, MANY, limits, width=3)
    assert [len(s) for s in found.sequences] == [1, 2, 3, 4, 5]
    assert all(score > -1e6 for score in found.scores)
