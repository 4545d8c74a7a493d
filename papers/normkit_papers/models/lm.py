"""Decoder-only Transformer: a language model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit_papers.models.adaptive import Adaptive
from normkit_papers.models.blocks import Cache, Embedding, Output, Stack, place_norms
from normkit_papers.models.config import Model
from normkit_papers.models.initialize import initialize


class DecoderLM(nn.Module):
    """Scores of each next word of texts without padding.

    >>> model = DecoderLM(Model(width=8, hidden=16, depth=1, heads=2), vocab=5)
    >>> model(torch.tensor([[4, 3, 2]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, config: Model, vocab: int):
        super().__init__()
        self.config = config
        if config.adaptive and not config.tie:
            raise ValueError("adaptive embeddings are tied to the output; tie=False needs adaptive=()")
        self.embedding = Embedding(config, vocab)
        self.decoder = Stack(config, config.decoder_depth or config.depth)
        if not config.adaptive:
            self.output = Output(config.width, vocab, self.embedding.table if config.tie else None)
        initialize(self, config.init)
        place_norms(self, config)

    def forward(self, tokens: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return logits `[batch, time, words]` of the next word of `tokens [batch, time]`.

        The first token is at position `start`.

        With a cache, `tokens` holds the new ones only; the cache takes up their keys and values, or with relative
        attention what the next segment remembers.
        """
        x = self.hidden(tokens, cache, start)
        table = self.embedding.table
        return table(x) if isinstance(table, Adaptive) else self.output(x, table)

    def nll(self, tokens: Tensor, target: Tensor, cache: Cache | None = None) -> Tensor:
        """Mean of `-log p` of `target [B, T]`, the words after the last T of `tokens`.

        It is cheaper than all scores if embeddings are adaptive.
        """
        x, table = self.hidden(tokens, cache)[:, -target.shape[1] :], self.embedding.table
        if isinstance(table, Adaptive):
            return table.nll(x.flatten(0, 1), target.flatten())
        return F.cross_entropy(self.output(x, table).flatten(0, 1), target.flatten())

    def hidden(self, tokens: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return the decoder's output `[B, T, width]`."""
        x, length = self.embedding(tokens, start), tokens.shape[1]
        mask = None
        if start and length > 1:
            mask = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)
        return self.decoder(x, mask=mask, causal=start == 0, cache=cache)
