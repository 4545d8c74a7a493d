"""Perplexity of a Llama with weights of 4 bits: as it is, its gains folded, and rotated.

    python benchmarks/quantize.py /tmp/SmolLM2-135M-Instruct wiki.valid.tokens.xz

All linear layers but the output layer get integers with one scale for each output channel, or for each group of 32
weights, rounded to the nearest; "inputs 8 bits" rounds what they read, too, for each token. Rows go to
benchmarks/results/quantize.csv: the perplexity of the first tokens of the text, in windows, and by how much its
logarithm exceeds that of the original in float32, with a standard error over windows. Rotations are random; the number
behind "rotated" is their seed.
"""

import argparse
import copy
import lzma
import math
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import rows
import torch
import torchao
from rotate_a_language_model import rotated, rotation
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)

import normkit as nk
from normkit.fold.folders import example_for
from normkit.models.huggingface import import_transformers, load_pretrained

RESULTS = Path(__file__).parent / "results" / "quantize.csv"
KEY = ("model", "weights", "variant")
COLUMNS = (
    *KEY, "perplexity", "log_ratio", "standard_error", "tokens", "windows", "torchao", "torch", "device", "commit",
    "command",
)  # fmt: skip
WINDOW = 512
TYPES: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "4 bits, per channel": IntxWeightOnlyConfig(torch.int4, PerAxis(0)),
    "4 bits, groups of 32": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "4 bits, groups of 32; inputs 8 bits": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
}


def stored(model: Any, config: Any) -> Any:
    """A copy of a model with weights of another type."""
    model = copy.deepcopy(model)
    if isinstance(config, torch.dtype):
        return model.to(config)
    quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and not name.endswith("lm_head"))
    return model


@torch.no_grad()
def losses(model: Any, ids: Tensor) -> Tensor:
    """The mean negative log-likelihood in each of several windows of tokens, `[windows, tokens]`."""
    found = []
    for window in ids:
        logits = model(input_ids=window[None], use_cache=False).logits[0].float()
        found.append(F.cross_entropy(logits[:-1], window[1:]).double())
    return torch.stack(found)


def main() -> None:
    """Measure, and write rows; the first is the original in float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a Llama")
    parser.add_argument("text", type=Path, help="text, packed by xz")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1, help="number of rotations")
    parser.add_argument("--weights", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    with lzma.open(given.text, "rt", encoding="utf8", newline="\n") as file:
        text = file.read(8 * WINDOW * given.windows)
    model = load_pretrained(given.folder).float().eval()
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(given.folder)
    ids = torch.tensor(tokenizer(text).input_ids)[: WINDOW * given.windows].view(-1, WINDOW)
    folded, report = nk.fold(model, untie=True, **example_for(model))
    print(report.summary)
    variants = {"original": model, "folded": folded}
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        variants[f"folded, rotated {seed}"] = rotated(folded, rotation(model.config.hidden_size))
    base = losses(model, ids)
    about = {
        "model": given.folder.name, "tokens": ids.numel(), "windows": len(ids), "torchao": torchao.__version__,
        "torch": torch.__version__, "device": rows.processor(), "commit": rows.commit(),
    }  # fmt: skip
    command = f"python benchmarks/quantize.py {given.folder.name} {given.text.name}"
    command += f" --windows {given.windows} --seeds {given.seeds} --weights "
    for weights in given.weights:
        for variant, each in variants.items():
            found = losses(stored(each, TYPES[weights]), ids)
            above = found - base
            row = {"weights": weights, "variant": variant, "perplexity": round(math.exp(found.mean()), 2), **about}
            row["command"] = command + shlex.quote(weights)
            row |= {"log_ratio": f"{above.mean():.4f}", "standard_error": f"{above.std() / len(ids) ** 0.5:.4f}"}
            print(row, flush=True)
            rows.keep(given.out, COLUMNS, KEY, [row])


if __name__ == "__main__":
    main()
