"""Language models: a Transformer decoder, and LSTMs with weight drop and a mixture of softmaxes."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit._util import require
from normkit_papers.models.blocks import Adaptive, Cache, Embedding, Output, Stack, causal, initialize, place_norms
from normkit_papers.models.config import Model


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
        x, table = self.hidden(tokens, cache, start), self.embedding.table
        return table.scores(x) if isinstance(table, Adaptive) else self.output(x, table)

    def nll(self, tokens: Tensor, target: Tensor, cache: Cache | None = None) -> Tensor:
        """Mean of `-log p` of `target [B, T]`, the words after the last T of `tokens`.

        It is cheaper than all scores if embeddings are adaptive.
        """
        x, table = self.hidden(tokens, cache)[:, -target.shape[1] :], self.embedding.table
        if isinstance(table, Adaptive):
            return table.nll(x, target)
        return F.cross_entropy(self.output(x, table).flatten(0, 1), target.flatten())

    def hidden(self, tokens: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return the decoder's output `[B, T, width]`."""
        return self.decoder(self.embedding(tokens, start), cache=cache, **causal(tokens, start))


class WeightDropLSTM(nn.LSTM):
    """A layer of `torch.nn.LSTM` with dropout of its recurrent weights in training.

    The same weights are zero for all words of a segment (weight drop, Merity et al. 2018).
    """

    def __init__(self, inputs: int, hidden: int, drop: float):
        super().__init__(inputs, hidden, batch_first=True)
        self.drop = drop

    def forward(  # type: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return outputs `[batch, time, hidden]`, and both states `[1, batch, hidden]`."""
        inputs, recurrent, *biases = self.all_weights[0]
        weights = [inputs, F.dropout(recurrent, self.drop, self.training), *biases]
        state = state or (x.new_zeros(1, len(x), self.hidden_size),) * 2
        # nn.LSTM passes its own parameters to this function, so that a parametrization of them has no effect
        output, hidden, cell = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        return output, (hidden, cell)


class LSTMLM(nn.Module):
    """Scores of each next word by layers of LSTM.

    The output is tied to the embedding (Inan et al. 2017). Dropout has one mask for all words of a segment (Gal &
    Ghahramani 2016). With `experts` the output is a mixture of softmaxes (Yang et al. 2018):
    `p(word | h) = sum_k p(k | h) softmax(E tanh(W_k h) + b)`. There are no norms.

    >>> model = LSTMLM(Model(arch="lstm", width=8, hidden=12, depth=2, experts=3), vocab=5)
    >>> cache = {}
    >>> model(torch.tensor([[4, 3, 2]]), cache).exp().sum(-1).detach().round(decimals=4).tolist()
    [[1.0, 1.0, 1.0]]
    """

    def __init__(self, config: Model, vocab: int):
        super().__init__()
        require(config.norm == "layer" and not config.norm_at, "norm", config.norm, "layer for arch=lstm: it has none")
        require(config.tie and not config.adaptive, "tie", config.tie, "True, without adaptive, for arch=lstm")
        require(not config.fixnorm, "fixnorm", config.fixnorm, "False for arch=lstm")
        self.config = config
        last = config.last_hidden or config.width
        require(last == config.width or config.experts > 1, "last_hidden", last, f"width={config.width} with 1 expert")
        sizes = [config.width, *[config.hidden] * (config.depth - 1), last]
        self.embedding = nn.Embedding(vocab, config.width)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.layers = nn.ModuleList(WeightDropLSTM(a, b, config.weight_drop) for a, b in pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(vocab))
        if config.experts > 1:
            self.latent = nn.Linear(last, config.experts * config.width)
            self.prior = nn.Linear(last, config.experts, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits `[batch, time, words]`; log probabilities if there are several experts.

        The cache holds the state after earlier tokens, and takes up the new one without its gradient.
        """
        cache, config = {} if cache is None else cache, self.config
        x = self._dropout(self.embedding(tokens), config.dropout)
        for number, layer in enumerate(self.layers):
            if number:
                x = self._dropout(x, config.hidden_dropout)
            x, state = layer(x, cache.get(str(number)))
            cache[str(number)] = tuple(part.detach() for part in state)
        x = self._dropout(x, config.dropout)
        if config.experts == 1:
            return F.linear(x, self.embedding.weight, self.bias)
        latent = self._dropout(self.latent(x).tanh(), config.hidden_dropout).unflatten(-1, (config.experts, -1))
        words = F.linear(latent, self.embedding.weight, self.bias).log_softmax(-1)
        return (words + self.prior(x).log_softmax(-1)[..., None]).logsumexp(-2)

    def _dropout(self, x: Tensor, drop: float) -> Tensor:
        mask = x.new_ones(len(x), 1, x.shape[-1])
        return x * F.dropout(mask, drop) if self.training and drop else x
