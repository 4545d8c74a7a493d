"""Fill the tables about small devices in docs/deploying.md.

They come from benchmarks/results/edge-*.json.

python benchmarks/edge_page.py
"""

import argparse
import json
import re
import statistics
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "deploying.md"
NORMS = {"layer": "LayerNorm", "un": "UN", "folded": "UN folded"}


def ethos_table(rows: list[dict]) -> list[str]:
    """Operations, cycles and memory by model, NPU and norms."""
    lines = [
        "| model | NPU | norms | operations on NPU, CPU | cycles | to LayerNorm | SRAM, KiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(
            r for r in rows if (r["model"], r["accelerator"], r["norms"]) == (row["model"], row["accelerator"], "layer")
        )
        lines.append(
            f"| {row['model']} | {row['accelerator']} | {NORMS[row['norms']]} | {row['npu']}, {row['cpu']} | "
            f"{row['cycles']:,} | {row['cycles'] / base['cycles']:.2f} | {row['sram_kib']:.0f} |"
        )
    return lines


def accuracy_table(rows: list[dict]) -> list[str]:
    """Accuracy of trained models in float and in int8."""
    lines = ["| norms | float32 | int8 | test images |", "|---|---|---|---|"]
    trained = {row["norms"]: row for row in rows if row["images"]}
    return lines + [
        f"| {NORMS[norms]} | {row['float']:.1f} % | {row['int8']:.1f} % | {row['images']:,} |"
        for norms, row in trained.items()
    ]


def ezkl_table(rows: list[dict]) -> list[str]:
    """Rows of circuits, and seconds of proofs."""
    lines = ["| model | norms | rows | to LayerNorm | seconds of a proof | to LayerNorm |", "|---" * 6 + "|"]
    base = {row["model"]: row for row in rows if row["norms"] == "layer"}
    for row in rows:
        layer, took = base[row["model"]], row.get("seconds", [])
        time = f"{statistics.median(took):.1f}" if took else ""
        ratios = [mine / other for mine, other in zip(took, layer.get("seconds", []), strict=True)]
        to_layer = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        cells = [row["model"], NORMS[row["norms"]], f"{row['rows']:,}", f"{row['rows'] / layer['rows']:.2f}", time]
        lines.append(f"| {' | '.join([*cells, to_layer])} |")
    return lines


def xnnpack_table(rows: list[dict]) -> list[str]:
    """Pieces that XNNPACK takes, operations outside, and time."""
    lines = [
        "| model | numbers | norms | pieces | operations outside | ms | to LayerNorm |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["numbers"])):
        ratio = row["obstacle"] or "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["to_layer"])
        cells = [row["model"], row["numbers"], NORMS[row["norms"]], row["pieces"], row["outside"], f"{row['ms']:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {ratio} |")
    return lines


TABLES = {
    "ethos": ("ethos", ethos_table, ("litert-torch", "ai-edge-quantizer", "ethos-u-vela")),
    "accuracy": ("ethos", accuracy_table, ("litert-torch", "ai-edge-quantizer")),
    "xnnpack": ("xnnpack", xnnpack_table, ("executorch",)),
    "ezkl": ("ezkl", ezkl_table, ("ezkl", "onnx")),
}
"""Tables of the page: the result file, the function that formats its rows, and packages to name."""


def table(name: str) -> str:
    """Format a table of the page, with the command and the versions under it."""
    source, lines, packages = TABLES[name]
    result = json.loads((RESULTS / f"edge-{source}.json").read_text(encoding="utf8"))
    where = result["where"]
    versions = ", ".join(f"{package} {where[package]}" for package in packages)
    commands = "; ".join(f"`{command}`" for command in dict.fromkeys(result["commands"].values()))
    origin = f"{commands}. {versions}, torch {where['torch']}; {where['device']}, commit {where['commit'][:7]}."
    return "\n".join([*lines(result["rows"]), "", *textwrap.wrap(origin, 120)])


def fill(page: str) -> str:
    """Return the page with every marked place filled."""
    place = re.compile(r"<!-- measured: edge-(\w+) -->\n.*?<!-- /measured -->", re.DOTALL)
    return place.sub(lambda m: f"<!-- measured: edge-{m[1]} -->\n{table(m[1])}\n<!-- /measured -->", page)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(fill(PAGE.read_text(encoding="utf8")), encoding="utf8")
