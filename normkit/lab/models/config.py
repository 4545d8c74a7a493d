"""What a Transformer of ours looks like, as one frozen value."""

import dataclasses
from typing import Literal

INITS = ("xavier", "small", "ds", "fixup", "t-fixup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes, norms and dropout of a model.

    >>> Model(norm="un(window=4)", norm_at={"decoder.*": "layer"}).placement
    'pre'
    """

    arch: str = ""
    """Pictures: a row of the table of models, as resnet20; sizes below are then those of tiny_vit alone."""
    image_size: int = 32
    """Pictures: height and width that the model takes, in pixels."""
    patch: int = 4
    """Pictures: height and width of a patch of tiny_vit, in pixels."""
    width: int = 512
    """Channels of the residual stream."""
    hidden: int = 1024
    """Channels inside the feed-forward blocks."""
    depth: int = 6
    """Layers of the encoder, and of the decoder unless decoder_depth says otherwise."""
    decoder_depth: int | None = None
    """Layers of the decoder."""
    heads: int = 8
    """Attention heads."""
    norm: str = "layer"
    """Spec of the norms, as un(window=4)."""
    norm_at: dict[str, str] = dataclasses.field(default_factory=dict)
    """Specs for some places: pattern of module names, as decoder.* or *.final_norm, then spec; the first match wins."""
    placement: Literal["pre", "post"] = "pre"
    """Norm before each block, or after the addition."""
    attention: Literal["dot", "multilinear"] = "dot"
    """Scaled dot products, or the tensorized Transformer's core-1, over max_length words, in a language model."""
    rank: int = 40
    """Components of multi-linear attention."""
    init: Literal["xavier", "small", "ds", "fixup", "t-fixup"] = "xavier"
    """Xavier; SmallInit of the attention; or smaller with depth: DS-Init, Fixup, T-Fixup."""
    fixnorm: bool = False
    """Word vectors of length one."""
    tie: bool = True
    """Output projection and target embedding are one matrix."""
    share: bool = False
    """Source and target embedding are one matrix; needs one vocabulary."""
    dropout: float = 0.0
    """Dropout of embeddings and of each block's output."""
    attention_dropout: float = 0.0
    """Dropout of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout inside the feed-forward blocks."""
    word_dropout: float = 0.0
    """Share of words that training replaces by the unknown one, in source and target."""
    mask_logits: bool = False
    """Only what the training targets have can be said: of a shared vocabulary, not the other language."""
    layer_drop: float = 0.0
    """Share of layers that a training step leaves out; of models of pictures, drop path."""
    adaptive: tuple[int, ...] = ()
    """Numbers of the most frequent words up to which embeddings are wide; each next group's are a fourth as wide."""
    max_length: int = 1024
    """Longest sequence."""

    def __post_init__(self):
        object.__setattr__(self, "adaptive", tuple(self.adaptive))  # JSON has lists
        for name in ("width", "hidden", "depth", "heads", "max_length", "rank", "image_size", "patch"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(
            self.decoder_depth is None or self.decoder_depth >= 1, "decoder_depth", self.decoder_depth, "at least 1"
        )
        _require(self.width % self.heads == 0, "heads", self.heads, f"a divisor of width={self.width}")
        _require(self.width % 2 == 0, "width", self.width, "even, for sines and cosines of positions")
        _require(self.placement in ("pre", "post"), "placement", self.placement, "pre or post")
        _require(self.init in INITS, "init", self.init, f"one of {', '.join(INITS)}")
        _require(not (self.adaptive and self.fixnorm), "fixnorm", self.fixnorm, "False with adaptive embeddings")
        _require(self.attention in ("dot", "multilinear"), "attention", self.attention, "dot or multilinear")
        for name in ("dropout", "attention_dropout", "hidden_dropout", "word_dropout", "layer_drop"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
