"""Initial weights of a Transformer: Xavier, SmallInit, and ones that shrink with depth."""

from torch import nn

from normkit_papers.models.blocks import Attention, Embedding, FeedForward, Layer, Stack
from normkit_papers.models.mixers import Convolution


def initialize(model: nn.Module, how: str) -> None:
    """Draw the weights of all attention and feed-forward blocks, in place; biases are 0.

    Both linear maps of a convolution count as those of a feed-forward block. L is the number of layers of a stack.

    "xavier": N(0, 2 / (fan in + fan out)), so sqrt(2 / 2d) in the attention. "small" (SmallInit, Nguyen & Salazar 2019,
    Eq. 4): all four projections of the attention N(0, 2 / (d + 4d)), as if they were as wide as the feed-forward
    blocks. The others start from Xavier:

    - "ds" (DS-Init, Zhang et al. 2019): all weights of the l-th layer of a stack divided by sqrt(l), l = 1, 2, ...;
    - "fixup" (Zhang, Dauphin & Ma 2019): the first map of each block times R ** (-1/2), R being the residual blocks of
      the stack, and the last map of each block zero; its scale and shift before each block are what
      `nonorm(affine=True)` has, one a channel where the paper has one a block;
    - "t-fixup" (Huang et al. 2020): value and output maps of the attention, and both maps of the feed-forward blocks,
      times 0.67 L ** (-1/4) in the encoder, (9 L) ** (-1/4) in a decoder; so are the word vectors.

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
    if how not in ("xavier", "small"):
        _shrink(model, how)


def _shrink(model: nn.Module, how: str) -> None:
    """The inits that depend on the number of layers, applied to Xavier's weights."""
    factor = 1.0
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        layers = [layer for layer in stack.layers if isinstance(layer, Layer)]
        decodes = any(layer.cross is not None for layer in layers)
        factor = (9 * len(layers)) ** -0.25 if decodes else 0.67 * len(layers) ** -0.25
        residuals = len(layers) * (3 if decodes else 2)
        for number, layer in enumerate(layers, 1):
            attentions = [block for block in (layer.attention, layer.cross) if isinstance(block, Attention)]
            for block in attentions:
                every = (block.query, block.key, block.value, block.out)
                if how == "ds":
                    _scale(every, number**-0.5)
                elif how == "fixup":
                    _scale(every[:3], residuals**-0.5)
                    _scale(every[3:], 0.0)
                else:
                    _scale(every[2:], factor)
            for block in (layer.attention, layer.feedforward):
                if not isinstance(block, FeedForward | Convolution):
                    continue
                if how == "fixup":
                    _scale((block.inner,), residuals**-0.5)
                    _scale((block.outer,), 0.0)
                else:
                    _scale((block.inner, block.outer), number**-0.5 if how == "ds" else factor)
    if how == "t-fixup":
        for module in model.modules():
            if isinstance(module, Embedding) and isinstance(module.table, nn.Embedding):
                module.table.weight.data.mul_(factor)


def _scale(linears: tuple[nn.Linear, ...], factor: float) -> None:
    for linear in linears:
        linear.weight.data.mul_(factor)


def _normal(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, 0, std)
    nn.init.zeros_(linear.bias)
