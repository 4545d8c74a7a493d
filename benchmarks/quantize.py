"""Perplexity of a Llama whose weights are quantized to 4 bits by torchao: as it is, folded, and rotated after the fold.

    python benchmarks/quantize.py /tmp/smollm2 wiki.valid.tokens.xz

All linear layers but the output layer are quantized, with one scale for each output channel or for each group of 32
weights. Rows go to benchmarks/results/quantize.csv: the perplexity of the first tokens of the text, in windows, and the
largest difference of a logit from the original, relative to the largest logit, on the first window.
"""

import argparse
import copy
import lzma
import math
from pathlib import Path
from typing import Any

import rows
import torch
import torchao
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

import normkit as nk
from normkit.fold.folders import example_for
from normkit.models.huggingface import import_transformers

RESULTS = Path(__file__).parent / "results" / "quantize.csv"
COLUMNS = ("model", "weights", "bits", "scale", "perplexity", "difference", "tokens", "torchao", "torch", "commit")
WINDOW = 1024
SCALES = {"channel": PerAxis(0), "group of 32": PerGroup(32)}


def rotation(size: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix: a Hadamard matrix, as large as possible, times a random one, with random signs."""
    generator = torch.Generator().manual_seed(seed)
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2), hadamard)
    rest = torch.linalg.qr(torch.randn(size // power, size // power, generator=generator, dtype=torch.float64)).Q
    signs = 2.0 * torch.randint(2, (size, 1), generator=generator) - 1
    return signs * torch.kron(rest, hadamard)


@torch.no_grad()
def rotated(model: Any, q: Tensor) -> Any:
    """A copy of a folded Llama whose residual stream is rotated, with products in float64."""
    model = copy.deepcopy(model)
    layers = model.model.layers
    readers = [model.lm_head, model.model.embed_tokens]
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers += [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    for reader in readers:
        reader.weight.copy_(reader.weight.double() @ q)
    for writer in (each for layer in layers for each in (layer.self_attn.o_proj, layer.mlp.down_proj)):
        writer.weight.copy_(q.T @ writer.weight.double())
    return model


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> tuple[float, Tensor]:
    """The perplexity of windows of tokens, `[windows, tokens]`, and the logits of the first window."""
    loss, first = 0.0, torch.empty(0)
    for window in ids:
        logits = model(input_ids=window[None], use_cache=False).logits[0].float()
        first = first if len(first) else logits
        loss += float(F.cross_entropy(logits[:-1], window[1:], reduction="sum"))
    return math.exp(loss / (ids.numel() - len(ids))), first


def main() -> None:
    """Measure, and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a Llama")
    parser.add_argument("text", type=Path, help="text, packed by xz")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    transformers = import_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.folder)
    with lzma.open(given.text, "rt", encoding="utf8", newline="\n") as file:
        text = file.read(8 * given.tokens)
    ids = torch.tensor(tokenizer(text).input_ids)[: given.tokens].view(-1, WINDOW)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    folded, report = nk.fold(model, untie=True, **example_for(model))
    print(report.summary)
    models = {"original": model, "folded": folded, "rotated": rotated(folded, rotation(model.config.hidden_size))}
    expected = torch.empty(0)
    for name, each in models.items():
        for bits, scale in ((32, ""), (4, "channel"), (4, "group of 32")):
            tried = copy.deepcopy(each)
            if scale:
                config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=SCALES[scale])
                quantize_(tried, config, lambda m, key: isinstance(m, nn.Linear) and not key.endswith("lm_head"))
            found, logits = perplexity(tried, ids)
            expected = expected if len(expected) else logits
            difference = float((logits - expected).abs().max() / expected.abs().max())
            row = {"model": given.folder.name, "weights": name, "bits": bits, "scale": scale, "tokens": ids.numel(),
                   "perplexity": round(found, 2), "difference": f"{difference:.1e}", "torchao": torchao.__version__,
                   "torch": torch.__version__, "commit": rows.commit()}  # fmt: skip
            print(row, flush=True)
            rows.keep(given.out, COLUMNS, ("model", "weights", "bits", "scale"), [row])


if __name__ == "__main__":
    main()
