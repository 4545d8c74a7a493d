"""Normalizing operations in exported files, with LayerNorm, with UN, and with UN folded.

    pip install -e ".[export,openvino,executorch]" && python benchmarks/runtimes.py [--show results/runtimes.json]

Exports the tiny pre-norm ViT of this project (random weights, gains, biases and statistics) to each runtime, runs it
there and compares. Counts operations, measures no time. Writes results/runtimes.json and from it docs/exporting.md;
--show writes only the page.
"""

import argparse
import importlib.util
import json
import tempfile
import warnings
from pathlib import Path

import torch
from normkit_papers.models.config import Model
from normkit_papers.models.vit import TinyViT
from normkit_papers.report import markdown
from normkit_papers.train.environment import environment

from normkit.fold import fold
from normkit.models import convert, export
from normkit.norms import Norm, StatNorm

RUNTIMES = {"onnx": "onnxruntime", "pt2": "torch", "xml": "openvino", "pte": "executorch"}
PAGE = """# Export

This page lets you write a model as ONNX, `torch.export`, OpenVINO or ExecuTorch file, and shows which operations of
norms are left in it.

```python
import torch
from torch import nn
import normkit as nk

model = nk.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)), "un").eval()
example = torch.randn(4, 8)
folded, report = nk.fold(model, example)
exported = nk.export(folded, "model.pt2", example)
print(exported)  # operations, those that normalize, the largest error
```

`nk.export` writes the file, runs it in its runtime, and raises an error if the outputs differ from the model's. The
suffix selects the format:

| suffix | runtime | install |
|---|---|---|
| `.onnx` | onnxruntime | `pip install -e ".[export]"` |
| `.pt2` | `torch.export` | nothing |
| `.xml` | OpenVINO | `pip install -e ".[openvino]"` |
| `.pte` | ExecuTorch with XNNPACK, fixed shapes | `pip install -e ".[executorch]"` |

`outputs=lambda out: out.logits` exports a part of the output. The batch axis stays open; `dynamic=False` fixes it.

## Integers

`int8=batches` quantizes the model to 8-bit integers, calibrated on your batches. The tools are those of each runtime:
onnxruntime's static quantization (QDQ), nncf for OpenVINO, torchao's PT2E for ExecuTorch.

```python
batches = [torch.randn(4, 8) for _ in range(4)]
exported = nk.export(folded, "model.onnx", example, int8=batches)
print(exported.max_error, exported.cosine)  # of the integers, to the model in float
```

`int8=nk.Int8(batches, scope="stream")` also computes additions and multiplications in integers, so that residual
streams are integers. Weights have one scale for each output channel; `per_channel=False` gives each weight one scale.
The addition of an attention mask stays in float.

## What is left of the norms

The tiny ViT of this project with {norms} norms, random weights, gains, biases and statistics:

{table}

*Error* is the largest difference to the model's own outputs, relative to the largest output. Counted by
`python benchmarks/runtimes.py`, which wrote this page: {versions}.

- ReduceMean is the pooling of tokens before the head, not a norm.
- XNNPACK has no LayerNorm, so each one splits the model. What stays outside in the folded ViT belongs to attention
  (masks of rows without keys).
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


def measure() -> list[dict]:
    """Export each model to each installed runtime, and count operations."""
    example, rows = torch.randn(2, 3, 16, 16), []
    with tempfile.TemporaryDirectory() as folder:
        for suffix, package in RUNTIMES.items():
            if importlib.util.find_spec(package) is None:
                continue
            for name, model in models().items():
                done = export(model, Path(folder) / f"model.{suffix}", example)
                rows.append({"runtime": done.runtime, "file": suffix, "norms": name, "error": done.max_error,
                             "operations": sum(done.operations.values()), "normalizing": done.normalizing,
                             "outside": done.operations if suffix == "pte" else None})  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def page(result: dict) -> str:
    """Format docs/exporting.md from the result file."""
    rows = result["rows"]
    lines = []
    for row in rows:
        left = ", ".join(f"{n} {op.removesuffix('.default')}" for op, n in row["normalizing"].items()) or "none"
        if row["outside"]:
            pieces = row["outside"]["executorch_call_delegate"]
            left += f"; XNNPACK took {pieces} pieces and left {row['operations'] - pieces} operations outside"
        file = f"`.{row['file']}` ({row['runtime']})"
        lines.append([file, row["norms"], row["operations"], left, f"{row['error']:.0e}"])
    missing = [name for suffix, name in RUNTIMES.items() if suffix not in {row["file"] for row in rows}]
    versions = f"normkit {result['where']['commit'][:7]}, torch {result['where']['torch']}"
    versions += f"; not installed: {', '.join(missing)}" if missing else ""
    norms = sum(isinstance(m, Norm) for m in models()["LayerNorm"].modules())
    head = ["file", "norms", "operations", "of normalization", "error"]
    return PAGE.format(table=markdown.table(head, lines), versions=versions, norms=norms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/runtimes.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/exporting.md"))
    parser.add_argument("--show", type=Path, help="a result file to write the page from, without exporting")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.show:
        result = json.loads(given.show.read_text(encoding="utf8"))
    else:
        result = {"what": __doc__.splitlines()[0], "rows": measure(), "where": environment()}
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    given.page.write_text(page(result), encoding="utf8")


if __name__ == "__main__":
    main()
