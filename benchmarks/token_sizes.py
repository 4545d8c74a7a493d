"""Measure how the sizes of tokens differ in a language model, and what explains it.

    python benchmarks/token_sizes.py SMOLLM2 wiki.train.txt papers/results/token-sizes-smollm2.csv

A norm with frozen statistics treats all tokens alike. Statistics by position could take up what position explains.
"""

import argparse
import shlex
import sys
from pathlib import Path

import rows
import torch
from torch import Tensor

import normkit
from normkit.models.invoke import seen
from normkit.removal.texts import Texts, read_text, split

FIELDS = ("depth", "norm", "deviation", "by_position", "by_token", "tokens", "command", "commit", "device")
LENGTH, WINDOWS = 256, 32  # tokens of a text, and texts


def explained(values: Tensor, groups: Tensor) -> float:
    """Estimate the part of the variance that groups explain (omega squared of one factor).

    >>> explained(torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1]))
    1.0
    """
    _, group, counts = groups.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), dtype=values.dtype).index_add(0, group, values) / counts
    within = (values - means[group]).square().sum()
    total = (values - values.mean()).square().sum()
    error = within / (len(values) - len(counts))
    return float((total - within - (len(counts) - 1) * error) / (total + error))


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Measure, and write a row for each norm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a causal model with its tokenizer")
    parser.add_argument("text", help="its held-out part is read")
    parser.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    model = normkit.load_pretrained(given.model).float().eval()
    from transformers import AutoTokenizer

    texts = Texts(split(read_text(given.text))[1], AutoTokenizer.from_pretrained(given.model), LENGTH, causal=True)
    sizes: dict[str, list[Tensor]] = {name: [] for name in normkit.find(model)}
    batches = texts.of_length(LENGTH, WINDOWS)
    with seen(model, sizes, lambda name, x, mask, y: sizes[name].append(x.double().square().mean(-1).sqrt().log())):
        for batch in batches:
            model(**batch, use_cache=False)
    token = torch.cat([batch["input_ids"] for batch in batches])[:, 1:].flatten()  # the first token is large in itself
    position = torch.arange(LENGTH - 1).repeat(len(token) // (LENGTH - 1))
    command = shlex.join(["python", "benchmarks/token_sizes.py", *(arguments or sys.argv[1:])])
    where = {"tokens": len(token), "command": command, "commit": rows.commit(), "device": rows.processor()}
    found = []
    for depth, (name, parts) in enumerate(sizes.items()):
        size = torch.cat(parts)[:, 1:].flatten()
        parted = {"by_position": explained(size, position), "by_token": explained(size, token)}
        values = {key: f"{value:.4f}" for key, value in {"deviation": float(size.std()), **parted}.items()}
        found.append({"depth": depth, "norm": name, **values, **where})
    rows.keep(given.out, FIELDS, ("norm",), found)


if __name__ == "__main__":
    main()
