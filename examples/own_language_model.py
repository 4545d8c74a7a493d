"""Train a byte language model of one's own with norms that fold, and fold it.

    python examples/own_language_model.py --norm un --std 0.02 --steps 400

The head is tied to the embedding. With PyTorch's initial standard deviation of 1 a few bytes become much larger than
others, and `un`, whose statistics are of all tokens, falls behind; with 0.02, as in GPT-2, it does not.
Half a minute on a CPU.
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn

import normkit as nk

parser = argparse.ArgumentParser()
parser.add_argument("--norm", default="un(warmup=40)", help="spec of the norm")
parser.add_argument("--std", type=float, default=0.02, help="of the embedding at the start")
parser.add_argument("--steps", type=int, default=120)
args = parser.parse_args()
LENGTH, WIDTH = 64, 64
text = torch.tensor([*"\n".join(pydoc_data.topics.topics.values()).encode()])


class LanguageModel(nn.Module):
    """A pre-norm Transformer over bytes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embedding.weight, std=args.std)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        """Logits `[batch, tokens, 256]` of the next bytes."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        return self.head(self.body(x, mask=mask, is_causal=True))


def loss_of(model, pieces):
    """Nats a byte."""
    return criterion(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def draw(count):
    """Pieces of the text."""
    return text[torch.randint(len(text) - LENGTH - 1, (count, 1)) + torch.arange(LENGTH + 1)]


torch.manual_seed(0)
criterion = nn.CrossEntropyLoss()
model = nk.convert(LanguageModel(), args.norm)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
with nk.record(model, loss=criterion, every=10) as rows:
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = loss_of(model, draw(16))
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    scores = [float(loss_of(model, draw(16))) for _ in range(20)]
print(f"{args.norm}, initial standard deviation {args.std}: {sum(scores) / len(scores):.2f} nats a byte")
print(nk.diagnose(rows))
folded, report = nk.fold(model, draw(2)[:, :-1])
print(report.summary)
