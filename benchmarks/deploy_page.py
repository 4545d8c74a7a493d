"""Tables of benchmarks/results/deploy-*.json for docs/ and README."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy import RUNTIMES
from deploy_models import MODELS, NORMS
from normkit_papers.report import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHORTEST = 5  # ms; shorter calls scatter too much for the headline
HEADLINE = ("time, float32", "time, int8", "cosine in int8, LayerNorm", "cosine in int8, folded")
INFERENCE = """# Inference, folded

This page compares models with LayerNorm, with `un`, and with `un` folded at inference, in float32 and in 8-bit
integers. [Deploying without norms](deploying.md) explains the results, and how to get such a model. Measure on your
device with:

```
python benchmarks/deploy.py --models bert6 --runtimes onnxruntime
```

Trained models need their weights, `--weights FOLDER`. In that folder, with MiniLM's published files as `layer`:

```
for norm in layer un; do
  normkit train g2p_cmudict --model.norm $norm --out g2p-$norm
  normkit train mt_multi30k --model.norm $norm --out multi30k-$norm
done
normkit remove-norms layer --text wikitext-2 --steps 2400 --unfolded --out out && mv out/unfolded un
```

Each variant runs on one thread, pinned to a core; all variants of a table take turns. A cell has the median ratio
within rounds and, in brackets, the 20th and 80th percentile. *Alike* is relative to LayerNorm in the same scheme,
*best* to LayerNorm's fastest scheme of the same precision. A range that contains 1.00 is no clear difference. *Cosine*
is that of the outputs to the float32 model on one example. *MB* is the size of the file, and the peak memory of loading
and running it. *Operations* are those of the graph that runs; *Q* and *DQ* quantize and dequantize. *With VNNI* names a
CPU with instructions for 8-bit integers; tables without it leave that open, as older runs did not record it.
*int8 products* and *int8 stream* are the two [schemes](deploying.md#time): matrix products in integers, or the residual
stream too.

## Overview

Time of the folded model relative to LayerNorm: in float32; then, after the semicolon, in int8, each in its fastest
scheme, the folded model with limited `spread` where a table below has that. "-" was not measured.

{overview}

{tables}
"""


def results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The result files, in the order of MODELS, small batches first."""
    order = list(MODELS)
    found = [json.loads(path.read_text(encoding="utf8")) for path in folder.glob("deploy-*.json")]
    first = [result["rows"][0] for result in found]
    keys = [(order.index(row["model"]), row["batch"], row["runtime"]) for row in first]
    return [result for _, result in sorted(zip(keys, found, strict=True), key=lambda pair: pair[0])]


def span(row: dict[str, Any], key: str) -> str:
    """A ratio with its percentiles, or the reason why there is none."""
    if row["obstacle"]:
        return "too noisy" if row["n"] >= 60 else "too few rounds"
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**row[key])


def folded(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the folded model; those in int8 with limited `spread`, if there are any."""
    rows = list(rows)
    in_integers = "limited" if any(row["norm"] == "limited" for row in rows) else "folded"
    return [row for row in rows if row["norm"] == (in_integers if row["precision"] == "int8" else "folded")]


def cpu(where: dict[str, Any]) -> str:
    """The device, and whether it has instructions for 8-bit integers, where that was recorded."""
    return f"{where['device']}{' with VNNI' if where.get('vnni') else ''}"


def headline(folder: Path = RESULTS) -> str:
    """Times of the folded model relative to LayerNorm in onnxruntime, batch 1."""
    lines = []
    in_onnx = [result for result in results(folder) if result["rows"][0]["runtime"] == "onnxruntime"]
    shown = [r for r in in_onnx if r["rows"][0]["batch"] == 1 and r["rows"][0]["ms"] >= SHORTEST]
    for result in shown:
        rows = result["rows"]
        cells = [span(row, "to_same") for row in rows if (row["precision"], row["norm"]) == ("float32", "folded")]
        layer = [row for row in rows if row["precision"] == "int8" and row["norm"] == "layer"]
        best = [row for row in folded(rows) if row["precision"] == "int8" and row["is_best"]]
        cells += [span(row, "to_best") for row in best]
        fastest, *slower = (f"{row['cosine']:.4f}" for row in sorted(layer, key=lambda row: not row["is_best"]))
        cells += [f"{fastest} ({', '.join(slower)})", *(f"{row['cosine']:.4f}" for row in best)]
        lines.append([MODELS[rows[0]["model"]][0], *cells])
    where, n = shown[0]["where"], shown[0]["rows"][0]["n"]
    commits = ", ".join(dict.fromkeys(result["where"]["commit"][:7] for result in shown))
    names = ", ".join(f"`{result['rows'][0]['model']}`" for result in shown)
    return "\n".join([
        ("Inference time with `un` folded, relative to LayerNorm (median, 20th to 80th percentile), and likeness to "
        "float32:"), "",
        markdown.table(["model", *HEADLINE], lines), "",
        (f"In onnxruntime, batch 1, one pinned thread of an {cpu(where)}, n = {n} rounds by turns, commit {commits}. "
        "Int8 by the faster of two schemes; in brackets LayerNorm\nin the slower one. Only MiniLM's weights are "
        "trained. In int8 it is folded with `spread=4`, which leaves 2 of 13 norms as a multiplication and an "
        "addition; with all but one folded its cosine is 0.41."),
        ("`python benchmarks/deploy.py --models bert6 --out runs/deploy` reproduces the first row in two minutes, "
        "after `pip install -e '.[export,huggingface]'`;\n"
        f"the rows are {names} (`vit` and `swin` need the extra `vision`)."),
    ])  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> str:
    """All variants of one model in one runtime."""
    lines = []
    for row in rows:
        kind = f"{row['precision']} {row['recipe']}".strip()
        ratios = [span(row, key) for key in ("to_same", "to_best")]
        cosine = f"{row['cosine']:.4f}" if row.get("cosine") else ""
        memory = f"{row['file_mb']:.1f}, {row['memory_mb'] or float('nan'):.0f}" if "file_mb" in row else ""
        in_onnx = row["precision"] == "int8" and row["runtime"] == "onnxruntime"
        pairs = f"{row['quantize']}, {row['dequantize']}" if in_onnx else ""
        ms = f"{row['ms']:.2f}"
        lines.append([kind, NORMS[row["norm"]], ms, *ratios, cosine, memory, row.get("operations", ""), pairs])
    return markdown.table(
        ["precision", "norm", "ms", "alike", "best", "cosine", "MB file, peak", "operations", "Q, DQ"], lines
    )


def overview(found: list[dict[str, Any]]) -> str:
    """A row a model and batch, a column a runtime: the folded model relative to LayerNorm."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for result in found:
        rows = result["rows"]
        first = rows[0]
        best = {row["precision"]: span(row, "to_best") for row in folded(rows) if row["is_best"]}
        precisions = ("float32",) if first["runtime"] in ("eager", "compiled") else ("float32", "int8")
        ratios = [best.get(precision, "-") for precision in precisions]
        cells.setdefault((first["model"], first["batch"]), {})[first["runtime"]] = "; ".join(ratios)
    runtimes = [name for name in RUNTIMES if any(name in row for row in cells.values())]
    lines = [[MODELS[model][0], batch, *(row.get(name, "-") for name in runtimes)]
             for (model, batch), row in cells.items()]  # fmt: skip
    return markdown.table(["model", "batch", *runtimes], lines)


def inference(folder: Path = RESULTS) -> str:
    """The page with all tables."""
    parts: list[str] = []
    seen = ""
    for result in results(folder):
        rows, where = result["rows"], result["where"]
        first, title = rows[0], MODELS[rows[0]["model"]][0]
        if title != seen:
            parts += [f"## {title}", ""]
            notes = {NORMS[row["norm"]]: row["note"] for row in rows if row.get("note")}
            parts += [f"{name}: {note}." for name, note in notes.items()] + ([""] if notes else [])
        seen = title
        parts += [f"**{first['runtime']}, batch {first['batch']}**", "", table(rows), ""]
        device = f"{first['n']} rounds, one thread of an {cpu(where)}, torch {where['torch']}"
        noise = f"a variant to itself {first['noise']:.3f}"
        parts += [f"{device}; {noise}; commit {where['commit'][:7]}: `{result['command']}`", ""]
    return INFERENCE.format(overview=overview(results(folder)), tables="\n".join(parts).rstrip())


def write_pages(folder: Path = RESULTS) -> None:
    """Write docs/inference.md and the marked parts of docs/deploying.md and README.md."""
    (ROOT / "docs" / "inference.md").write_text(inference(folder), encoding="utf8")
    for page in (ROOT / "docs" / "deploying.md", ROOT / "README.md"):
        made = {"deploy": headline(folder)}
        page.write_text(markdown.fill(page.read_text(encoding="utf8"), made.get), encoding="utf8")
