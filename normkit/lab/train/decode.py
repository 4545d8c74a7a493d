"""Search for the best output sequence: greedy and beam, for whole batches, with the decoder's cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.lab.data.vocab import BOS, EOS, PAD
from normkit.lab.models.blocks import Cache
from normkit.lab.models.mt import Seq2Seq


class Found(NamedTuple):
    """Sequences of numbers without begin and end, and the score by which each was chosen."""

    sequences: list[list[int]]
    scores: list[float]


@torch.no_grad()
def greedy(model: Seq2Seq, source: Tensor, max_length: int | Tensor = 64) -> Found:
    """The most likely next symbol, over and over; the score is the sum of log probabilities, the end included.

    `source [B, S]`; `max_length` bounds the symbols of each sentence, one number for all or one each. A sentence that
    has ended leaves the batch; the search stops when none is left. A sentence comes out the same whatever else is in
    its batch. ValueError for a limit below 1.
    """
    limit, found = _prepare(max_length, source)
    memory, real = model.encode(source)
    scores = torch.zeros(len(source), device=source.device, dtype=torch.float64)
    growing = torch.arange(len(source), device=source.device)  # the sentences that the rows of all else belong to
    last = torch.full((len(source), 1), BOS, device=source.device)
    cache: Cache = {}
    for step in range(found.shape[1]):
        log_p, symbol = _next(model.decode(last, memory, real, cache, step)).max(-1)
        found[growing, step] = symbol
        scores[growing] += log_p
        rows = ((symbol != EOS) & (step + 1 < limit[growing])).nonzero().flatten()
        if not len(rows):
            break
        if len(rows) < len(growing):
            growing, symbol, memory, real = growing[rows], symbol[rows], memory[rows], real[rows]
            cache = {name: (keys[rows], values[rows]) for name, (keys, values) in cache.items()}
        last = symbol[:, None]
    return Found([_cut(row) for row in found.tolist()], scores.tolist())


@torch.no_grad()
def beam(
    model: Seq2Seq,
    source: Tensor,
    width: int = 4,
    length_penalty: float = 0.6,
    max_length: int | Tensor = 64,
    length_offset: float = 5.0,
) -> Found:
    """The best of `width` hypotheses kept at every step, by `log p / penalty(length)`.

    The penalty is `((offset + length) / (offset + 1)) ** length_penalty`, over all symbols with the end: with offset 5
    that of Wu et al. 2016, Eq. 14, with 0 fairseq's; `length_penalty=0` compares plain probabilities. A sentence
    is done, and leaves the batch, when no hypothesis alive can still beat its best finished one; when none
    has ended within `max_length`, the best one alive counts as it stands. `source` and `max_length` are those of
    `greedy`. ValueError for a width or a limit below 1, or a penalty below 0.
    """
    if width < 1:
        raise ValueError(f"beam width must be at least 1; got {width}")
    if length_penalty < 0 or length_offset < 0:
        raise ValueError(f"length_penalty and length_offset must be at least 0; got {length_penalty}, {length_offset}")
    limit, found = _prepare(max_length, source)
    memory, real = model.encode(source)
    best = torch.full((len(source),), -torch.inf, device=source.device, dtype=torch.float64)
    growing = torch.arange(len(source), device=source.device)  # the sentences that the rows of all else belong to
    history = torch.full((len(source), width, 1), BOS, device=source.device)
    scores = best[:, None].repeat(1, width)
    scores[:, 0] = 0  # all hypotheses start alike: let one of them grow
    cache: Cache = {}
    for step in range(found.shape[1]):
        log_p = _next(model.decode(history[:, :, -1].reshape(-1, 1), memory, real, cache, step))
        words = log_p.shape[-1]
        total = (scores[..., None] + log_p.view(len(growing), width, words)).flatten(1)
        scores, index = total.topk(min(2 * width, total.shape[1]))  # at most `width` of them end
        parent, symbol = index // words, index % words
        grown = torch.cat([_take(history, parent), symbol[..., None]], 2)

        penalty = ((length_offset + step + 1) / (length_offset + 1)) ** length_penalty
        ends = symbol == EOS
        value, at = (scores.where(ends, -torch.inf)[:, :width] / penalty).max(1)
        _note(found, best, growing, grown[range(len(at)), at, 1:], value)

        scores, chosen = scores.where(~ends, -torch.inf).topk(width)
        history, parent = _take(grown, chosen), parent.gather(1, chosen)
        full = step + 1 >= limit[growing]
        unended = scores[:, 0].where(full & best[growing].isinf(), -torch.inf) / penalty
        _note(found, best, growing, history[:, 0, 1:], unended)

        # log p only falls from here on, and the penalty is largest at the limit
        hope = scores[:, 0] / ((length_offset + limit[growing].double()) / (length_offset + 1)) ** length_penalty
        rows = (~full & (hope > best[growing])).nonzero().flatten()
        if not len(rows):
            break
        origin = (parent[rows] + width * rows[:, None]).flatten()
        some = len(rows) < len(growing)
        for name, (keys, values) in cache.items():
            if not name.endswith(".cross"):
                cache[name] = keys[origin], values[origin]
            elif some:
                cache[name] = keys[rows], values[rows]
        if some:
            growing, history, scores = growing[rows], history[rows], scores[rows]
            memory, real = memory[rows], real[rows]
    return Found([_cut(row) for row in found.tolist()], best.tolist())


def _note(found: Tensor, best: Tensor, sentences: Tensor, sequences: Tensor, value: Tensor) -> None:
    """Write down, in place, the sequence of each sentence whose value beats its best so far."""
    better = value > best[sentences]
    best[sentences] = torch.where(better, value, best[sentences])
    found[sentences[better], : sequences.shape[1]] = sequences[better]


def _take(of: Tensor, index: Tensor) -> Tensor:
    """Rows `index [B, n]` of `of [B, m, T]`."""
    return of.gather(1, index[..., None].expand(-1, -1, of.shape[2]))


def _next(scores: Tensor) -> Tensor:
    """Log probabilities of the next symbol, in float64; padding and begin never follow."""
    scores = scores[:, -1].double()
    scores[:, [PAD, BOS]] = -torch.inf
    return scores.log_softmax(-1)


def _prepare(max_length: int | Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The limit of each sentence `[B]`, and room for the sequences `[B, longest]`, ends all over."""
    limit = torch.as_tensor(max_length, device=source.device).expand(len(source))
    if len(limit) and int(limit.min()) < 1:
        raise ValueError(f"max_length must be at least 1; got {int(limit.min())}")
    longest = int(limit.max()) if len(limit) else 0
    return limit, torch.full((len(source), longest), EOS, device=source.device)


def _cut(row: list[int]) -> list[int]:
    return row[: row.index(EOS)] if EOS in row else row
