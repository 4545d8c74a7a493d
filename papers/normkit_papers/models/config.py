"""Sizes and norms of a model, as one frozen dataclass."""

import dataclasses
from typing import Literal

from normkit._util import require
from normkit_papers.fields import Checked, limited

Init = Literal["xavier", "small", "ds", "fixup", "t-fixup"]
WIDEST = 2**20  # larger sizes exceed any memory, or never finish
DEEPEST = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Checked):
    """Sizes, norms and dropout of a model.

    >>> Model(norm="un(window=4)", norm_at={"decoder.*": "layer"}).placement
    'pre'
    """

    arch: str = ""
    """Architecture. Images: e.g. resnet20. Language models: lstm, or empty for a decoder.

    The sizes below are those of tiny_vit and of Transformers."""
    image_size: int = limited(32, at_least=1, at_most=WIDEST)
    """Images: height and width of the model's input, in pixels."""
    patch: int = limited(4, at_least=1, at_most=WIDEST)
    """Images: height and width of a patch of tiny_vit, in pixels."""
    width: int = limited(512, at_least=1, at_most=WIDEST)
    """Channels of the residual stream."""
    hidden: int = limited(1024, at_least=1, at_most=WIDEST)
    """Channels inside the feed-forward blocks."""
    depth: int = limited(6, at_least=1, at_most=DEEPEST)
    """Layers of the encoder, and of the decoder if decoder_depth is not set."""
    decoder_depth: int | None = limited(None, at_least=1, at_most=DEEPEST)
    """Layers of the decoder."""
    heads: int = limited(8, at_least=1, at_most=WIDEST)
    """Attention heads."""
    norm: str = "layer"
    """Spec of the norms, e.g. un(window=4)."""
    norm_at: dict[str, str] = dataclasses.field(default_factory=dict)
    """Specs for some modules: name pattern (decoder.*, *.final_norm), then spec; the first match counts."""
    placement: Literal["pre", "post"] = "pre"
    """Norm before each block, or after the residual addition."""
    attention: Literal["dot", "multilinear", "relative", "lightconv", "dynamicconv"] = "dot"
    """Self-attention by scaled dot products. In a language model also multi-linear over max_length words (tensorized
    Transformer), or by distances and with carried memory (Transformer-XL). Or a lightweight or dynamic convolution."""
    kernels: tuple[int, ...] = (3, 7, 15, 31)
    """Tokens that each layer's convolution reads, odd; the last number holds for all further layers."""
    memory: int = limited(0, at_least=0, at_most=WIDEST)
    """Words of earlier segments that a segment's words attend to; needs attention=relative."""
    test_memory: int | None = limited(None, at_least=0, at_most=WIDEST)
    """The same at inference; None: as in training.

    With other attention the test reads these words again, unscored."""
    rank: int = limited(40, at_least=1, at_most=WIDEST)
    """Components of multi-linear attention."""
    cores: int = limited(1, at_least=1, at_most=WIDEST)
    """Cores of multi-linear attention; their mean counts."""
    experts: int = limited(1, at_least=1, at_most=WIDEST)
    """LSTM: softmaxes of which the output is a mixture; 1 for a single softmax."""
    last_hidden: int | None = limited(None, at_least=1, at_most=WIDEST)
    """LSTM: channels of the last layer; None: width. The others have `hidden`."""
    weight_drop: float = limited(0.0, at_least=0, below=1)
    """LSTM: dropout of recurrent weights."""
    init: Init = "xavier"
    """Initialization: Xavier, SmallInit of the attention, or smaller with depth (DS-Init, Fixup, T-Fixup)."""
    reparametrize: Literal["none", "weight", "spectral"] = "none"
    """Weight (started on the first batch) or spectral normalization of linear and convolution layers."""
    fixnorm: bool = False
    """Word vectors of length one."""
    tie: bool = True
    """Output projection and target embedding share one matrix."""
    share: bool = False
    """Source and target embedding share one matrix; needs one vocabulary."""
    dropout: float = limited(0.0, at_least=0, below=1)
    """Dropout of embeddings and of each block's output."""
    attention_dropout: float = limited(0.0, at_least=0, below=1)
    """Dropout of attention weights, and of those of convolutions."""
    hidden_dropout: float = limited(0.0, at_least=0, below=1)
    """Dropout inside the feed-forward blocks."""
    word_dropout: float = limited(0.0, at_least=0, below=1)
    """Fraction of words that training replaces by the unknown word, in source and target."""
    mask_logits: bool = False
    """Allow only words of the training targets as output; with a shared vocabulary, none of the source language."""
    layer_drop: float = limited(0.0, at_least=0, below=1)
    """Fraction of layers that a training step skips; for images, stochastic depth (drop path)."""
    adaptive: tuple[int, ...] = ()
    """Vocabulary cut-offs of adaptive embeddings; each further group has vectors a fourth as wide."""
    max_length: int = limited(1024, at_least=1, at_most=WIDEST)
    """Longest sequence, in tokens."""

    def __post_init__(self):
        super().__post_init__()
        require(self.width % self.heads == 0, "heads", self.heads, f"a divisor of width={self.width}")
        require(self.width % 2 == 0, "width", self.width, "even, for sines and cosines of positions")
        odd = bool(self.kernels) and all(kernel % 2 and 0 < kernel <= WIDEST for kernel in self.kernels)
        require(odd, "kernels", self.kernels, f"odd numbers from 1 to {WIDEST}")
        require(not (self.adaptive and self.fixnorm), "fixnorm", self.fixnorm, "False with adaptive embeddings")
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
