"""Blocks of the Transformers: attention, feed-forward, residual placement, embeddings."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit.norms import LayerNorm, Norm, fix_embedding, parse
from normkit_papers.models.adaptive import Adaptive
from normkit_papers.models.config import Model
from normkit_papers.models.mixers import Convolution, MultiLinear, RelativeAttention

PAD, UNKNOWN = 0, 3  # numbers of padding and of the unknown word in every vocabulary; between them begin and end

Cache = dict[str, tuple[Tensor, ...]]
"""What a model keeps of earlier tokens, by the name of the block.

Keys and values of attention, `[batch, heads, length, width / heads]`; inputs of relative attention or of a convolution,
`[batch, length, width]`; states of an LSTM.
"""


class Attention(nn.Module):
    """Multi-head attention from `x [batch, time, width]` to `memory [batch, source, width]`."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `memory`, split into heads."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mix the tokens of `x`; the blocks in place of attention have this method, too.

        Args:
            x: The tokens, `[batch, time, width]`, after those of `past`.
            past: What the call for the tokens before returned, () at the first tokens; None if nothing is kept.
            real: True for real tokens, `[batch, time]`.
            mask: Allowed attention.
            causal: Read earlier tokens only.

        Returns:
            The output, and what the call for the next tokens takes as `past`: keys and values.
        """
        pair = self.project(x)
        if past:
            key, value = (torch.cat(both, 2) for both in zip(past, pair, strict=True))
            pair = key, value
        return self(x, pair, mask, causal), pair

    def forward(
        self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend where `mask` is True, broadcast to `[batch, heads, time, source]`."""
        return self.attend(self._split(self.query(x)), pair, mask, causal)

    def attend(self, query: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool) -> Tensor:
        """Attend from queries that are split into heads."""
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, *pair, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class RotaryAttention(Attention):
    """Attention by dot products of queries and keys that are rotated by their position (Su et al. 2021, Eq. 34)."""

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attend to `x` and the tokens before it; see `Attention.mix`. Keys are kept rotated."""
        start = past[0].shape[2] if past else 0
        key, value = self.project(x)
        query, key = _rotate(self._split(self.query(x)), start), _rotate(key, start)
        if past:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        return self.attend(query, (key, value), mask, causal), (key, value)


def _rotate(x: Tensor, start: int) -> Tensor:
    """Rotate the pairs `(i, i + half)` of the channels of `x [..., time, channels]`; the first is at `start`."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(start, start + x.shape[-2], device=x.device)[:, None] * rates
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class FeedForward(nn.Module):
    """Two linear maps with a ReLU between."""

    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`outer(relu(inner(x)))`."""
        return self.outer(self.dropout(F.relu(self.inner(x))))


def _mixer(config: Model, kernel: int) -> Attention | MultiLinear | RelativeAttention | Convolution:
    """Build the block of a layer that mixes tokens."""
    width, dropout = config.width, config.attention_dropout
    if config.attention == "dot":
        return Attention(width, config.heads, dropout)
    if config.attention == "rotary":
        return RotaryAttention(width, config.heads, dropout)
    if config.attention == "multilinear":
        return MultiLinear(width, config.rank, config.max_length, dropout, config.cores)
    if config.attention == "relative":
        return RelativeAttention(width, config.heads, dropout, (config.memory, config.memory_at_test))
    return Convolution(width, config.heads, kernel, config.attention == "dynamicconv", dropout)


def apply_norm(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Apply `norm(x, mask)`; a module that replaced a folded norm takes no mask."""
    return norm(x, mask) if isinstance(norm, Norm) else norm(x)


class Layer(nn.Module):
    """Self-attention or a convolution, cross-attention if `cross`, feed-forward.

    Each in a residual with its norm. A convolution reads `kernel` tokens.

    Pre-norm `x + f(norm(x))`, post-norm `norm(x + f(x))`.
    """

    def __init__(self, config: Model, cross: bool = False, kernel: int = 3):
        super().__init__()
        self.placement: Literal["pre", "post"] = config.placement
        self.attention = _mixer(config, kernel)
        self.attention_norm = LayerNorm(config.width)
        self.cross = Attention(config.width, config.heads, config.attention_dropout) if cross else None
        self.cross_norm = LayerNorm(config.width) if cross else None
        self.feedforward = FeedForward(config.width, config.hidden, config.hidden_dropout)
        self.feedforward_norm = LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        real: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        name: str = "",
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: `[batch, time, width]`; several rows in succession may share one of `memory`, as hypotheses of a beam.
            real: Mask of real tokens for the norms, `[batch, time]`.
            mask: Allowed self-attention.
            causal: Attend to earlier tokens only.
            memory: Output of the encoder.
            memory_mask: Allowed attention to the memory.
            cache: Keys and values of earlier tokens, updated in place.
            name: Key of this layer in the cache.
        """

        def mix(y: Tensor) -> Tensor:
            y, kept = self.attention.mix(y, None if cache is None else cache.get(name, ()), real, mask, causal)
            if cache is not None:
                cache[name] = kept
            return y

        def attend_memory(y: Tensor) -> Tensor:
            assert self.cross is not None
            assert memory is not None
            key = f"{name}.cross"
            pair = self.cross.project(memory) if cache is None or key not in cache else cache[key]
            if cache is not None:
                cache[key] = pair
            if len(y) == len(memory):
                return self.cross(y, pair, memory_mask)
            return self.cross(y.reshape(len(memory), -1, y.shape[-1]), pair, memory_mask).view_as(y)

        x = self._residual(x, mix, self.attention_norm, real)
        if self.cross_norm is not None:
            x = self._residual(x, attend_memory, self.cross_norm, real)
        return self._residual(x, self.feedforward, self.feedforward_norm, real)

    def _residual(self, x: Tensor, block, norm: nn.Module, real: Tensor | None) -> Tensor:
        if self.placement == "pre":
            return x + self.dropout(block(apply_norm(norm, x, real)))
        return apply_norm(norm, x + self.dropout(block(x)), real)


class Stack(nn.Module):
    """Layers, and the final norm of pre-norm models."""

    def __init__(self, config: Model, depth: int, cross: bool = False):
        super().__init__()
        kernels = (config.kernels + config.kernels[-1:] * depth)[:depth]
        self.layers = nn.ModuleList(Layer(config, cross, kernel) for kernel in kernels)
        self.layer_drop = config.layer_drop
        self.final_norm = LayerNorm(config.width) if config.placement == "pre" else nn.Identity()

    def forward(self, x: Tensor, real: Tensor | None = None, **more) -> Tensor:
        """Compute all layers of `x [batch, time, width]`; `more` goes to each of them."""
        for index, layer in enumerate(self.layers):
            if self.training and self.layer_drop and torch.rand(()) < self.layer_drop:
                continue
            x = layer(x, real, name=str(index), **more)
        return apply_norm(self.final_norm, x, real)


class Embedding(nn.Module):
    """Word vectors times sqrt(width), plus sinusoidal positions (Vaswani et al. 2017, 3.5)."""

    positions: Tensor
    table: Any  # nn.Embedding, or Adaptive

    def __init__(self, config: Model, words: int, pad: int | None = None):
        super().__init__()
        self.width = config.width
        self.table = Adaptive(words, config.width, config.adaptive) if config.adaptive else _table(config, words, pad)
        self.dropout, self.word_dropout = nn.Dropout(config.dropout), config.word_dropout
        positions = sinusoids(config.max_length, config.width)
        if config.attention in ("rotary", "multilinear", "relative"):  # they have positions of their own
            positions.zero_()
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return vectors of `tokens [batch, time]`, the first of which is at position `start`."""
        end = start + tokens.shape[1]
        if end > len(self.positions):
            raise ValueError(f"a sequence of {end} tokens is longer than max_length={len(self.positions)}")
        if self.training and self.word_dropout:
            lost = torch.rand(tokens.shape, device=tokens.device) < self.word_dropout
            tokens = tokens.masked_fill(lost & (tokens > UNKNOWN), UNKNOWN)
        found = self.table.embed(tokens) if isinstance(self.table, Adaptive) else self.table(tokens)
        vectors = found * math.sqrt(self.width)
        return self.dropout(vectors + self.positions[start:end])


def _table(config: Model, words: int, pad: int | None) -> nn.Embedding:
    table = nn.Embedding(words, config.width, padding_idx=pad)
    nn.init.normal_(table.weight, 0, config.width**-0.5)
    if pad is not None:
        nn.init.zeros_(table.weight[pad])
    return fix_embedding(table) if config.fixnorm else table


class Output(nn.Module):
    """Logits of all words, `x @ E.T + bias`, with an own matrix or that of a tied embedding.

    A tied matrix is the parameter of the embedding itself. FixNorm computes the matrix at each use, so `forward` takes
    the embedding; the bias then has the name that it has without FixNorm, which folding removes.
    """

    linear: Any  # nn.Linear, or the bias alone

    def __init__(self, width: int, words: int, tied: nn.Embedding | None):
        super().__init__()
        self.fixed = tied is not None and parametrize.is_parametrized(tied, "weight")
        if self.fixed:
            self.linear = nn.ParameterDict({"bias": torch.zeros(words)})
            return
        self.linear = nn.Linear(width, words)
        nn.init.zeros_(self.linear.bias)
        if tied is None:
            nn.init.normal_(self.linear.weight, 0, width**-0.5)
        else:
            self.linear.weight = tied.weight

    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        """Return logits `[batch, time, words]`; `table` is the tied embedding, if any."""
        return F.linear(x, table.weight, self.linear["bias"]) if self.fixed else self.linear(x)


def sinusoids(length: int, width: int) -> Tensor:
    """Return positions `[length, width]`: sines, then cosines, as in fairseq.

    >>> sinusoids(2, 4)[0].tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    half = width // 2
    rates = torch.exp(torch.arange(half) * -(math.log(10_000) / max(half - 1, 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def place_norms(model: nn.Module, config: Model) -> None:
    """Replace the LayerNorms of a model by the norms of the configuration, in place."""
    from normkit.models import convert

    rules = {**config.norm_at, "*": config.norm}
    for spec in rules.values():
        parse(spec)
    convert(model, rules, inplace=True)
