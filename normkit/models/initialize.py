"""Initial weights of a Transformer (Nguyen & Salazar 2019, section 2.2)."""

from typing import Literal

from torch import nn

from normkit.models.blocks import Attention, FeedForward


def initialize(model: nn.Module, how: Literal["xavier", "small"]) -> None:
    """Draw the weights of all attention and feed-forward blocks, in place; biases are 0.

    "xavier": N(0, 2 / (fan in + fan out)), so sqrt(2 / 2d) in the attention. "small" (SmallInit, Eq. 4): all four
    projections of the attention N(0, 2 / (d + 4d)), as if they were as wide as the feed-forward blocks.

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
        elif isinstance(module, FeedForward):
            for linear in (module.inner, module.outer):
                _normal(linear, (2 / (linear.in_features + linear.out_features)) ** 0.5)


def _normal(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, 0, std)
    nn.init.zeros_(linear.bias)
