"""Search for the best output sequence: greedy and beam, for whole batches, with the decoder's cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.data.vocab import BOS, EOS, PAD
from normkit.models.mt import Seq2Seq


class Found(NamedTuple):
    """Sequences of numbers without begin and end, and the score by which each was chosen."""

    sequences: list[list[int]]
    scores: list[float]


@torch.no_grad()
def greedy(model: Seq2Seq, source: Tensor, max_length: int | Tensor = 64) -> Found:
    """The most likely next symbol, over and over; the score is the sum of log probabilities, the end included.

    `source [B, S]`; `max_length` bounds the symbols of each sentence, one number for all or one each. Stops when all
    sentences have ended. A sentence comes out the same whatever else is in its batch.
    """
    memory, real = model.encode(source)
    limit = _limits(max_length, source)
    alive = torch.ones(len(source), dtype=torch.bool, device=source.device)
    last = torch.full((len(source), 1), BOS, device=source.device)
    scores = torch.zeros(len(source), device=source.device, dtype=torch.float64)
    cache, out = {}, []
    for step in range(int(limit.max())):
        log_p = _next(model.decode(last, memory, real, cache, step))
        best, symbol = log_p.max(-1)
        alive = alive & (step < limit)
        scores += torch.where(alive, best.double(), 0)
        symbol = torch.where(alive, symbol, PAD)
        out.append(symbol)
        alive = alive & (symbol != EOS)
        last = torch.where(alive, symbol, EOS)[:, None]  # what follows an end is never looked at
        if not alive.any():
            break
    columns = torch.stack(out, 1).tolist() if out else [[] for _ in source]
    return Found([_cut(row) for row in columns], scores.tolist())


@torch.no_grad()
def beam(
    model: Seq2Seq, source: Tensor, width: int = 4, length_penalty: float = 0.6, max_length: int | Tensor = 64
) -> Found:
    """The best of `width` hypotheses kept at every step, by `log p / ((5 + length) / 6) ** length_penalty`.

    The length penalty is Wu et al. 2016, Eq. 14, over all symbols with the end; 0 compares plain probabilities. A
    sentence is done when no hypothesis alive can still beat its best finished one; one that reaches `max_length`
    without an end counts as it stands, when none has ended. ValueError for a width below 1.
    """
    if width < 1:
        raise ValueError(f"beam width must be at least 1; got {width}")
    batch, device = len(source), source.device
    limit = _limits(max_length, source)
    memory, real = model.encode(source)
    memory, real = memory.repeat_interleave(width, 0), real.repeat_interleave(width, 0)
    scores = torch.full((batch, width), -torch.inf, device=device, dtype=torch.float64)
    scores[:, 0] = 0  # all beams start alike: let one of them grow
    history = torch.full((batch, width, 1), BOS, device=device)
    best = [(-torch.inf, [])] * batch
    open_ = torch.ones(batch, dtype=torch.bool, device=device)
    cache, longest = {}, int(limit.max())
    for step in range(longest):
        last = history[:, :, -1].reshape(-1, 1)
        log_p = _next(model.decode(last, memory, real, cache, step)).double().view(batch, width, -1)
        words = log_p.shape[-1]
        total = (scores[..., None] + log_p).flatten(1)
        top, index = total.topk(min(2 * width, total.shape[1]), 1)  # at most `width` of them can be ends
        beam_of, symbol = index // words, index % words
        ends = (symbol == EOS) | (step + 1 >= limit)[:, None]
        penalty = ((5 + step + 1) / 6) ** length_penalty
        for i, k in ((ends & (top > -torch.inf) & open_[:, None]).nonzero()).tolist():
            if k >= width:
                continue
            final, value = symbol[i, k] == EOS, float(top[i, k]) / penalty
            forced = value - 1e9 if not final else value  # an end is better than running out of room
            if forced > best[i][0]:
                best[i] = (forced, history[i, beam_of[i, k], 1:].tolist() + ([] if final else [int(symbol[i, k])]))
        keep = torch.where(ends, -torch.inf, top).topk(width, 1)
        scores, chosen = keep.values, keep.indices
        parent = beam_of.gather(1, chosen)
        history = torch.cat(
            [history.gather(1, parent[..., None].expand(-1, -1, step + 1)), symbol.gather(1, chosen)[..., None]], 2
        )
        rows = (parent + torch.arange(batch, device=device)[:, None] * width).flatten()
        cache = {name: (k, v) if name.endswith(".cross") else (k[rows], v[rows]) for name, (k, v) in cache.items()}
        # log p only falls from here on, and the penalty is largest at the limit
        bound = scores[:, 0] / ((5 + limit.double()) / 6) ** length_penalty
        done = torch.tensor([value for value, _ in best], device=device, dtype=torch.float64)
        open_ = open_ & (bound > done) & (step + 1 < limit)
        if not open_.any():
            break
    return Found([sequence for _, sequence in best], [v + 1e9 if v < -1e8 else v for v, _ in best])


def _next(scores: Tensor) -> Tensor:
    """Log probabilities of the next symbol; padding and begin never follow."""
    scores = scores[:, -1].clone()
    scores[:, [PAD, BOS]] = -torch.inf
    return scores.log_softmax(-1)


def _limits(max_length: int | Tensor, source: Tensor) -> Tensor:
    limit = torch.as_tensor(max_length, device=source.device).expand(len(source))
    if len(limit) and int(limit.min()) < 1:
        raise ValueError(f"max_length must be at least 1; got {int(limit.min())}")
    return limit


def _cut(row: list[int]) -> list[int]:
    return row[: row.index(EOS)] if EOS in row else [symbol for symbol in row if symbol != PAD]
