"""Blocks of the Transformers: attention, feed-forward, embeddings, initial weights."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit._util import require
from normkit.norms import LayerNorm, Norm, fix_embedding, parse
from normkit_papers.models.config import Model
from normkit_papers.models.mixers import Convolution, MultiLinear, RelativeAttention

PAD, UNKNOWN = 0, 3  # numbers of padding and of the unknown word in every vocabulary; between them begin and end

Cache = dict[str, tuple[Tensor, ...]]
"""What a model keeps of earlier tokens, by the name of the block.

Keys and values of attention, `[batch, heads, length, width / heads]`; inputs of relative attention or of a convolution,
`[batch, length, width]`; states of an LSTM.
"""


class Attention(nn.Module):
    """Multi-head attention from `x [batch, time, width]` to `memory [batch, source, width]`.

    If it is `rotary`, queries and keys are rotated by their position (Su et al. 2021, Eq. 34).
    """

    def __init__(self, width: int, heads: int, dropout: float, rotary: bool = False):
        super().__init__()
        self.heads, self.dropout, self.rotary = heads, dropout, rotary
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `memory`, split into heads."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mix the tokens of `x [batch, time, width]`; the blocks in place of attention have this method, too.

        `past` is what the call for the tokens before returned, () at the first tokens, None if nothing is kept; `real`
        is True for real tokens, `[batch, time]`; `mask` is the allowed attention.

        Returns:
            The output, and what the call for the next tokens takes as `past`: keys, rotated or not, and values.
        """
        (key, value), query = self.project(x), self._split(self.query(x))
        if self.rotary:
            start = past[0].shape[2] if past else 0
            query, key = _rotate(query, start), _rotate(key, start)
        if past:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        return self.attend(query, (key, value), mask, causal), (key, value)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """Attend from `x` to the keys and values of a memory."""
        return self.attend(self._split(self.query(x)), pair, mask)

    def attend(
        self, query: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend where `mask`, broadcast to `[batch, heads, time, source]`, is True."""
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, *pair, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _rotate(x: Tensor, start: int) -> Tensor:
    """Rotate channels `(i, i + half)` of `x [..., time, channels]`, which begins at `start`."""
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
    if config.attention in ("dot", "rotary"):
        return Attention(width, config.heads, dropout, config.attention == "rotary")
    if config.attention == "multilinear":
        return MultiLinear(width, config.rank, config.max_length, dropout, config.cores)
    if config.attention == "relative":
        return RelativeAttention(width, config.heads, dropout, (config.memory, config.memory_at_test))
    return Convolution(width, config.heads, kernel, dropout)


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
        """Compute the layer of `x [batch, time, width]`; masks are True where attention is allowed.

        Several rows of `x` in succession may share one of `memory`, as hypotheses of a beam. The cache, with keys and
        values of earlier tokens by the name of the layer, is updated in place.
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


def causal(tokens: Tensor, start: int) -> dict[str, Any]:
    """Return the arguments of layers for causal attention of tokens from `start` on."""
    length = tokens.shape[1]
    if not start or length == 1:
        return {"causal": not start}
    return {"mask": torch.ones(length, start + length, dtype=torch.bool, device=tokens.device).tril(start)}


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


class Adaptive(nn.AdaptiveLogSoftmaxWithLoss):
    """Word vectors in groups by frequency, and their output distribution (Baevski & Auli 2019).

    Words must be numbered by frequency. `cuts` are the numbers at which a group ends: words below `cuts[0]` have
    vectors of `width` channels, those of the next group `width / 4`, projected to `width`, and so on.

    >>> layer = Adaptive(words=10, width=16, cuts=(4, 7))
    >>> layer.embed(torch.tensor([[3, 9]])).shape, layer.scores(torch.zeros(1, 2, 16)).exp().sum().round().item()
    (torch.Size([1, 2, 16]), 2.0)
    """

    def __init__(self, words: int, width: int, cuts: Sequence[int]):
        require(width >= 4 ** len(cuts), "width", width, f"at least {4 ** len(cuts)} with {len(cuts)} cuts")
        super().__init__(width, words, cuts)
        for weight in self.parameters():  # those of rare words are [words, narrower], all others [..., width]
            nn.init.normal_(weight, 0, weight.shape[1] ** -0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return vectors `[..., width]` of words."""
        found = F.embedding(tokens.clamp(max=self.shortlist_size - 1), self.head.weight)
        for (start, end), (project, narrow) in zip(pairwise(self.cutoffs), self.tail, strict=True):  # type: ignore[reportGeneralTypeIssues]
            here = (tokens >= start) & (tokens < end)
            vectors = F.embedding((tokens - start).clamp(0, end - start - 1), narrow.weight) @ project.weight
            found = torch.where(here[..., None], vectors, found)
        return found

    def scores(self, x: Tensor) -> Tensor:
        """Return log probabilities `[batch, time, words]` of all words."""
        return self.log_prob(_wide(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    def nll(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean of `-log p` of `target [batch, time]`; only groups of the targets are computed."""
        return self(_wide(x).flatten(0, 1), target.flatten()).loss


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))  # as the losses that it is added to under autocast


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


def initialize(model: nn.Module, how: str) -> None:
    """Draw the weights of all attention and feed-forward blocks, in place; biases are 0.

    Both linear maps of a convolution count as those of a feed-forward block.

    "xavier": N(0, 2 / (fan in + fan out)), so sqrt(2 / 2d) in the attention. "small" (SmallInit, Nguyen & Salazar 2019,
    Eq. 4): all four projections of the attention N(0, 2 / (d + 4d)), as if they were as wide as the feed-forward
    blocks. The others start from Xavier:

    - "ds" (DS-Init, Zhang et al. 2019): all weights of the l-th layer of a stack divided by sqrt(l), l = 1, 2, ...;
    - "fixup" (Zhang, Dauphin & Ma 2019): the first map of each block times R ** (-1/2), R being the residual blocks of
      the stack, and the last map of each block zero; its scale and shift before each block are what
      `nonorm(affine=True)` has, one a channel where the paper has one a block.

    >>> block = Attention(8, 2, 0.0)
    >>> initialize(block, "small")
    >>> bool(block.out.bias.any())
    False
    """
    for module in model.modules():
        if isinstance(module, Attention):
            d = module.query.in_features
            for linear in (module.query, module.key, module.value, module.out):
                _normal(linear, (2 / (5 * d if how == "small" else 2 * d)) ** 0.5)
        elif isinstance(module, FeedForward | Convolution):
            for linear in (module.inner, module.outer):
                _normal(linear, (2 / (linear.in_features + linear.out_features)) ** 0.5)
    for stack in [module for module in model.modules() if isinstance(module, Stack) and how in ("ds", "fixup")]:
        residuals = sum(2 if layer.cross is None else 3 for layer in stack.layers)  # type: ignore[reportArgumentType]
        for number, layer in enumerate(stack.layers, 1):
            for block in (layer.attention, layer.cross, layer.feedforward):
                if isinstance(block, Attention):
                    first, last = (block.query, block.key, block.value), block.out
                elif isinstance(block, FeedForward | Convolution):
                    first, last = (block.inner,), block.outer
                else:
                    continue
                for linear in (*first, last):
                    linear.weight.data.mul_(number**-0.5 if how == "ds" else 0.0 if linear is last else residuals**-0.5)


def _normal(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, 0, std)
    nn.init.zeros_(linear.bias)
