"""Sizes and norms of a model, as one frozen dataclass."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from normkit._util import require
from normkit_papers.fields import CHECKED, Below1, Natural, Size

Depth = Annotated[int, Field(ge=1, le=10_000)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Model:
    """Sizes, norms and dropout of a model.

    >>> Model(norm="un(window=4)", norm_at={"decoder.*": "layer"}).placement
    'pre'
    """

    arch: str = ""
    """Architecture. Images: e.g. resnet20. Language models: lstm, or empty for a decoder.

    The sizes below are those of tiny_vit and of Transformers."""
    image_size: Size = 32
    """Images: height and width of the model's input, in pixels."""
    patch: Size = 4
    """Images: height and width of a patch of tiny_vit, in pixels."""
    width: Size = 512
    """Channels of the residual stream."""
    hidden: Size = 1024
    """Channels inside the feed-forward blocks."""
    depth: Depth = 6
    """Layers of the encoder, and of the decoder if decoder_depth is not set."""
    decoder_depth: Depth | None = None
    """Layers of the decoder."""
    heads: Size = 8
    """Attention heads."""
    norm: str = "layer"
    """Spec of the norms, e.g. un(window=4)."""
    norm_at: dict[str, str] = Field(default_factory=dict)
    """Specs for some modules: name pattern (decoder.*, *.final_norm), then spec; the first match counts."""
    placement: Literal["pre", "post"] = "pre"
    """Norm before each block, or after the residual addition."""
    attention: Literal["dot", "rotary", "multilinear", "relative", "dynamicconv"] = "dot"
    """Self-attention by scaled dot products. In a language model also with rotary positions; multi-linear over
    max_length words (tensorized Transformer); by distances and with carried memory (Transformer-XL). Or a dynamic
    convolution."""
    kernels: tuple[int, ...] = (3, 7, 15, 31)
    """Tokens that each layer's convolution reads, odd; the last number holds for all further layers."""
    memory: Natural = 0
    """Words of earlier segments that a segment's words attend to; needs attention=relative."""
    test_memory: Natural | None = None
    """The same at inference; None: as in training.

    With other attention the test reads these words again, unscored."""
    rank: Size = 40
    """Components of multi-linear attention."""
    cores: Size = 1
    """Cores of multi-linear attention; their mean counts."""
    experts: Size = 1
    """LSTM: softmaxes of which the output is a mixture; 1 for a single softmax."""
    last_hidden: Size | None = None
    """LSTM: channels of the last layer; None: width. The others have `hidden`."""
    weight_drop: Below1 = 0.0
    """LSTM: dropout of recurrent weights."""
    init: Literal["xavier", "small", "ds", "fixup"] = "xavier"
    """Initialization: Xavier, SmallInit of the attention, or smaller with depth (DS-Init, Fixup)."""
    fixnorm: bool = False
    """Word vectors of length one."""
    tie: bool = True
    """Output projection and target embedding share one matrix."""
    share: bool = False
    """Source and target embedding share one matrix; needs one vocabulary."""
    dropout: Below1 = 0.0
    """Dropout of embeddings and of each block's output."""
    attention_dropout: Below1 = 0.0
    """Dropout of attention weights, and of those of convolutions."""
    hidden_dropout: Below1 = 0.0
    """Dropout inside the feed-forward blocks."""
    word_dropout: Below1 = 0.0
    """Fraction of words that training replaces by the unknown word, in source and target."""
    mask_logits: bool = False
    """Allow only words of the training targets as output; with a shared vocabulary, none of the source language."""
    layer_drop: Below1 = 0.0
    """Fraction of layers that a training step skips; for images, stochastic depth (drop path)."""
    adaptive: tuple[int, ...] = ()
    """Vocabulary cut-offs of adaptive embeddings; each further group has vectors a fourth as wide."""
    max_length: Size = 1024
    """Longest sequence, in tokens."""

    def __post_init__(self):
        require(self.width % self.heads == 0, "heads", self.heads, f"a divisor of width={self.width}")
        require(self.width % 2 == 0, "width", self.width, "even, for sines and cosines of positions")
        odd = bool(self.kernels) and all(kernel % 2 and kernel > 0 for kernel in self.kernels)
        require(odd, "kernels", self.kernels, "odd numbers above 0")
        require(not (self.adaptive and self.fixnorm), "fixnorm", self.fixnorm, "False with adaptive embeddings")
        rotary = self.attention == "rotary" and self.width // self.heads % 2
        require(not rotary, "heads", self.heads, f"such that each has an even part of width={self.width} for rotary")
        relative = self.attention == "relative"
        require(relative or not self.memory, "memory", self.memory, "0 without attention=relative")

    @property
    def recurrent(self) -> bool:
        """True if the model carries state from each segment of a text to the next."""
        return self.arch == "lstm" or self.attention == "relative"

    @property
    def memory_at_test(self) -> int:
        """`test_memory`, or `memory` if that is None."""
        return self.memory if self.test_memory is None else self.test_memory
