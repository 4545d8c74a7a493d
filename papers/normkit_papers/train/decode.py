"""Greedy and beam search for batches, with the decoder's cache."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normkit_papers.data.vocab import BOS, EOS, PAD
from normkit_papers.models.blocks import Cache
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.train.config import PairRun


class Hypotheses(NamedTuple):
    """Token numbers without begin and end, and the score of each sequence."""

    sequences: list[list[int]]
    scores: list[float]


Search = Callable[[Seq2Seq, Tensor, int | Tensor], Hypotheses]
"""A search: model, source and the longest output give hypotheses."""


@torch.no_grad()
def beam(
    model: Seq2Seq,
    source: Tensor,
    max_length: int | Tensor = 64,
    *,
    width: int = 4,
    length_penalty: float = 0.6,
    length_offset: float = 5.0,
) -> Hypotheses:
    """Extend the best `width` hypotheses at each step, and choose the best `log p / penalty`.

    The penalty is `((offset + length) / (offset + 1)) ** length_penalty`, over all symbols and the end. A sentence
    leaves the batch when no hypothesis can exceed its best finished one. If none has ended within `max_length`, the
    best unfinished one is returned. `max_length` is one number for all sentences of `source [batch, time]`, or one for
    each; the offset is 5 in Wu et al. 2016, Eq. 14, and 0 in fairseq.
    """
    limit = torch.as_tensor(max_length, device=source.device).expand(len(source))
    found = torch.full((len(source), int(limit.max())), EOS, device=source.device)
    memory, real = model.encode(source)
    best = torch.full((len(source),), -torch.inf, device=source.device, dtype=torch.float64)
    active = torch.arange(len(source), device=source.device)  # sentence of each row
    history = torch.full((len(source), width, 1), BOS, device=source.device)
    scores = best[:, None].repeat(1, width)
    scores[:, 0] = 0  # all hypotheses are equal at first: extend one
    cache: Cache = {}
    for step in range(found.shape[1]):
        log_p = _next(model.decode(history[:, :, -1].reshape(-1, 1), memory, real, cache, step))
        words = log_p.shape[-1]
        total = (scores[..., None] + log_p.view(len(active), width, words)).flatten(1)
        scores, index = total.topk(min(2 * width, total.shape[1]))  # at most `width` of them end
        parent, symbol = index // words, index % words
        grown = torch.cat([_take(history, parent), symbol[..., None]], 2)

        penalty = ((length_offset + step + 1) / (length_offset + 1)) ** length_penalty
        ends = symbol == EOS
        value, at = (scores.where(ends, -torch.inf)[:, :width] / penalty).max(1)
        _store(found, best, active, grown[range(len(at)), at, 1:], value)

        scores, chosen = scores.where(~ends, -torch.inf).topk(width)
        history, parent = _take(grown, chosen), parent.gather(1, chosen)
        full = step + 1 >= limit[active]
        unended = scores[:, 0].where(full & best[active].isinf(), -torch.inf) / penalty
        _store(found, best, active, history[:, 0, 1:], unended)

        # log p only falls from here on, and the penalty is largest at the limit
        bound = scores[:, 0] / ((length_offset + limit[active].double()) / (length_offset + 1)) ** length_penalty
        rows = (~full & (bound > best[active])).nonzero().flatten()
        if not len(rows):
            break
        origin = (parent[rows] + width * rows[:, None]).flatten()
        fewer = len(rows) < len(active)
        for name, block in cache.items():
            if not name.endswith(".cross"):
                cache[name] = tuple(kept[origin] for kept in block)
            elif fewer:
                cache[name] = tuple(kept[rows] for kept in block)
        if fewer:
            active, history, scores = active[rows], history[rows], scores[rows]
            memory, real = memory[rows], real[rows]
    return Hypotheses([_cut(row) for row in found.tolist()], best.tolist())


def greedy(model: Seq2Seq, source: Tensor, max_length: int | Tensor = 64) -> Hypotheses:
    """Choose the most likely next symbol until the end: a beam of one without length penalty."""
    return beam(model, source, max_length, width=1, length_penalty=0.0)


def beam_search(settings: PairRun) -> Search:
    """Return `beam` with the settings of a run."""
    return functools.partial(
        beam, width=settings.beam, length_penalty=settings.length_penalty, length_offset=settings.length_offset
    )


def _store(found: Tensor, best: Tensor, sentences: Tensor, sequences: Tensor, value: Tensor) -> None:
    """Store, in place, the sequence of each sentence whose value exceeds its best one."""
    better = value > best[sentences]
    best[sentences] = torch.where(better, value, best[sentences])
    found[sentences[better], : sequences.shape[1]] = sequences[better]


def _take(of: Tensor, index: Tensor) -> Tensor:
    """Select rows `index [batch, n]` of `of [batch, m, time]`."""
    return of.gather(1, index[..., None].expand(-1, -1, of.shape[2]))


def _next(scores: Tensor) -> Tensor:
    """Return log probabilities of the next symbol in float64, without padding and begin."""
    scores = scores[:, -1].double()
    scores[:, [PAD, BOS]] = -torch.inf
    return scores.log_softmax(-1)


def _cut(row: list[int]) -> list[int]:
    return row[: row.index(EOS)] if EOS in row else row
