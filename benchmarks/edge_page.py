"""Fill the tables about small devices in docs/deploying.md.

They come from benchmarks/results/edge-*.json.

python benchmarks/edge_page.py
"""

import argparse
import json
import statistics
import textwrap
from pathlib import Path

from normkit_papers.report import markdown

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "deploying.md"
NORMS = {"layer": "LayerNorm", "un": "UN", "folded": "UN folded"}


def ethos_table(rows: list[dict]) -> str:
    """Operations, cycles and memory by model, NPU and norms."""
    base = {(row["model"], row["accelerator"]): row["cycles"] for row in rows if row["norms"] == "layer"}
    head = ["model", "NPU", "norms", "operations on NPU, CPU", "cycles", "to LayerNorm", "SRAM, KiB"]
    return markdown.table(head, [
        [row["model"], row["accelerator"], NORMS[row["norms"]], f"{row['npu']}, {row['cpu']}", f"{row['cycles']:,}",
         f"{row['cycles'] / base[row['model'], row['accelerator']]:.2f}", f"{row['sram_kib']:.0f}"]
        for row in rows
    ])  # fmt: skip


def accuracy_table(rows: list[dict]) -> str:
    """Accuracy of trained models in float and in int8."""
    trained = {row["norms"]: row for row in rows if row["images"]}
    return markdown.table(["norms", "float32", "int8", "test images"], [
        [NORMS[norms], f"{row['float']:.1f} %", f"{row['int8']:.1f} %", f"{row['images']:,}"]
        for norms, row in trained.items()
    ])  # fmt: skip


def ezkl_table(rows: list[dict]) -> str:
    """Rows of circuits, and seconds of proofs."""
    cells = []
    base = {row["model"]: row for row in rows if row["norms"] == "layer"}
    for row in rows:
        layer, took = base[row["model"]], row.get("seconds", [])
        time = f"{statistics.median(took):.1f}" if took else ""
        ratios = [mine / other for mine, other in zip(took, layer.get("seconds", []), strict=True)]
        to_layer = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        size = [f"{row['rows']:,}", f"{row['rows'] / layer['rows']:.2f}"]
        cells.append([row["model"], NORMS[row["norms"]], *size, time, to_layer])
    return markdown.table(["model", "norms", "rows", "to LayerNorm", "seconds of a proof", "to LayerNorm"], cells)


def xnnpack_table(rows: list[dict]) -> str:
    """Pieces that XNNPACK takes, operations outside, and time."""
    cells = []
    for row in sorted(rows, key=lambda row: (row["model"], row["numbers"])):
        ratio = row["obstacle"] or "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["to_layer"])
        names = [row["model"], row["numbers"], NORMS[row["norms"]]]
        cells.append([*names, row["pieces"], row["outside"], f"{row['ms']:.1f}", ratio])
    return markdown.table(["model", "numbers", "norms", "pieces", "operations outside", "ms", "to LayerNorm"], cells)


TABLES = {
    "ethos": ("ethos", ethos_table, ("litert-torch", "ai-edge-quantizer", "ethos-u-vela")),
    "accuracy": ("ethos", accuracy_table, ("litert-torch", "ai-edge-quantizer")),
    "xnnpack": ("xnnpack", xnnpack_table, ("executorch",)),
    "ezkl": ("ezkl", ezkl_table, ("ezkl", "onnx")),
}
"""Tables of the page: the result file, the function that formats its rows, and packages to name."""


def table(name: str) -> str:
    """Format a table of the page, with the command and the versions under it."""
    source, formatted, packages = TABLES[name]
    result = json.loads((RESULTS / f"edge-{source}.json").read_text(encoding="utf8"))
    where = result["where"]
    versions = ", ".join(f"{package} {where[package]}" for package in packages)
    commands = "; ".join(f"`{command}`" for command in dict.fromkeys(result["commands"].values()))
    origin = f"{commands}. {versions}, torch {where['torch']}; {where['device']}, commit {where['commit'][:7]}."
    return "\n".join([formatted(result["rows"]), "", *textwrap.wrap(origin, 120)])


def fill(page: str) -> str:
    """Return the page with its places `edge-...` filled."""
    return markdown.fill(page, lambda name: table(name[5:]) if name.startswith("edge-") else None)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(fill(PAGE.read_text(encoding="utf8")), encoding="utf8")
