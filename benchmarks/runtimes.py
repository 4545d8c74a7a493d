"""What is left of the norms in exported files: operations of normalization, and what XNNPACK leaves outside.

pip install -e ".[export,openvino,executorch]" && python benchmarks/runtimes.py

The tiny pre-norm ViT of this project (random weights, randomised gains, biases and statistics), with LayerNorm, with
UN and folded, is exported to each runtime, run there and compared. Counts, no clocks. Writes results/runtimes.json and
docs/exporting.md.
"""

import argparse
import importlib.util
import json
import tempfile
import warnings
from pathlib import Path

import torch

from normkit.lab.models.config import Model
from normkit.lab.models.vit import TinyViT
from normkit.lab.train.environment import environment
from normkit.norms import Norm, StatNorm
from normkit.transforms import convert, export, fold

RUNTIMES = {"onnx": "onnxruntime", "pt2": "torch", "xml": "openvino", "pte": "executorch"}
PAGE = """# Exported files

`nk.export(model, "model.onnx", *example)` writes a file, runs it, compares the outputs with the model's, and says what
operations of normalization are left in it. What they are for one model, the tiny ViT of this project ({norms} norms,
random weights, randomised gains, biases and statistics), counted by `python benchmarks/runtimes.py`, which wrote this
page:

{table}

The mean (ReduceMean) is the pooling of tokens before the head, no norm's. XNNPACK has no LayerNorm: each one cuts the
model into pieces. What stays outside of a folded one here is attention's (masks of rows that see nothing); a model of
Linear layers and activations is taken whole, in one piece (`tests/test_export.py`). *error* is the largest difference
to the model's own outputs, relative to the largest output. {versions}.
"""


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    layer = TinyViT(Model(width=32, hidden=64, depth=3, heads=4), 16, 4, 3, 10).eval()
    un = convert(layer, "un").eval()
    for model in (layer, un):
        for module in model.modules():
            if isinstance(module, Norm):
                torch.nn.init.uniform_(module.weight, 0.5, 2.0)
                torch.nn.init.normal_(module.bias)
            if isinstance(module, StatNorm):
                module.running.uniform_(0.5, 2.0)
    return {"LayerNorm": layer, "UN": un, "UN folded": fold(un, torch.randn(2, 3, 16, 16))[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/runtimes.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/exporting.md"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    example, rows = torch.randn(2, 3, 16, 16), []
    found = {ending: name for ending, name in RUNTIMES.items() if name == "torch" or importlib.util.find_spec(name)}
    with tempfile.TemporaryDirectory() as folder:
        for ending in found:
            for name, model in models().items():
                done = export(model, Path(folder) / f"model.{ending}", example)
                rows.append({"runtime": done.runtime, "file": ending, "norms": name, "error": done.max_error,
                             "operations": sum(done.operations.values()), "normalizing": done.normalizing,
                             "outside": done.operations if ending == "pte" else None})  # fmt: skip
                print(rows[-1], flush=True)
    result = {"what": __doc__.splitlines()[0], "rows": rows, "where": environment()}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    lines = ["| file | norms | operations | of normalization | error |", "|---|---|---|---|---|"]
    for row in rows:
        left = ", ".join(f"{n} {op.removesuffix('.default')}" for op, n in row["normalizing"].items()) or "none"
        if row["outside"]:
            pieces = row["outside"]["executorch_call_delegate"]
            left += f"; XNNPACK took {pieces} pieces and left {row['operations'] - pieces} operations outside"
        lines.append(f"| `.{row['file']}` ({row['runtime']}) | {row['norms']} | {row['operations']} | {left} | "
                     f"{row['error']:.0e} |")  # fmt: skip
    missing = [name for ending, name in RUNTIMES.items() if ending not in found]
    versions = f"normkit {result['where']['commit'][:7]}, torch {result['where']['torch']}"
    versions += f"; not installed, so not run: {', '.join(missing)}" if missing else ""
    norms = sum(isinstance(m, Norm) for m in models()["LayerNorm"].modules())
    given.page.write_text(PAGE.format(table="\n".join(lines), versions=versions, norms=norms), encoding="utf8")


if __name__ == "__main__":
    main()
