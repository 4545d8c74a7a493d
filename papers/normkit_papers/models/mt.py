"""Encoder-decoder Transformer, for translation and other sequence-to-sequence tasks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from normkit_papers.models.blocks import PAD, Cache, Embedding, Output, Stack, causal, initialize, place_norms
from normkit_papers.models.config import Model

LEAST = -1e9  # score of a masked word; finite, so that label smoothing stays finite


class Seq2Seq(nn.Module):
    """Encoder and decoder over two vocabularies, or over one that they share.

    Padding is masked.

    >>> model = Seq2Seq(Model(width=8, hidden=16, depth=1, heads=2), source_vocab=5, target_vocab=7)
    >>> model(torch.tensor([[4, 3, 0]]), torch.tensor([[1, 4]])).shape
    torch.Size([1, 2, 7])
    """

    allowed: Tensor

    def __init__(self, config: Model, source_vocab: int, target_vocab: int):
        super().__init__()
        if config.share and source_vocab != target_vocab:
            raise ValueError(
                f"share=True needs one vocabulary; got {source_vocab} source and {target_vocab} target words"
            )
        if config.adaptive or config.attention in ("rotary", "multilinear", "relative"):
            raise ValueError("adaptive embeddings, multi-linear and relative attention are for language models")
        self.config = config
        self.target_embedding = Embedding(config, target_vocab, PAD)
        self.source_embedding = self.target_embedding if config.share else Embedding(config, source_vocab, PAD)
        self.encoder = Stack(config, config.depth)
        self.decoder = Stack(config, config.decoder_depth or config.depth, cross=True)
        self.output = Output(config.width, target_vocab, self.target_embedding.table if config.tie else None)
        if config.mask_logits:
            self.register_buffer("allowed", torch.ones(target_vocab, dtype=torch.bool))
        initialize(self, config.init)
        place_norms(self, config)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits `[batch, time, words]` of the next symbol of `target`, given `source`."""
        memory, real = self.encode(source)
        return self.decode(target, memory, real)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output `[B, S, D]`, and which of its tokens are real, `[B, S]`."""
        real = source != PAD
        x = self.encoder(self.source_embedding(source), real, mask=real[:, None, None, :])
        return x, real

    def decode(
        self, target: Tensor, memory: Tensor, real: Tensor, cache: Cache | None = None, start: int = 0
    ) -> Tensor:
        """Scores of what follows each of `target [B, T]`, whose first token stands at `start`.

        With a cache, `target` holds the new tokens only; the cache takes up their keys and values.
        """
        x = self.target_embedding(target, start)
        more = {"memory": memory, "memory_mask": real[:, None, None, :], "cache": cache, **causal(target, start)}
        x = self.decoder(x, target != PAD, **more)
        scores = self.output(x, self.target_embedding.table)
        least = max(LEAST, torch.finfo(scores.dtype).min)
        return scores.masked_fill(~self.allowed, least) if self.config.mask_logits else scores

    def allow(self, words: Iterable[int]) -> None:
        """Allow these words alone in outputs, for a model with `mask_logits`; never padding."""
        self.allowed.fill_(False)
        self.allowed[torch.tensor([int(word) for word in words], device=self.allowed.device)] = True
