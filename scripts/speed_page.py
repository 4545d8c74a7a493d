"""Write the tables of docs/speed.md from benchmarks/results/*.csv.

Run `python scripts/speed_page.py`.
"""

import csv
from pathlib import Path

from normkit.lab.report.markdown import table
from normkit.lab.timing import obstacle

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"


def times(rows: list[dict], mode: str) -> str:
    """Ratios to nn.LayerNorm for each shape and type, with target and worst gap."""
    rows = [row for row in rows if row["pass"] == mode]
    places = list(dict.fromkeys((row["shape"], row["dtype"]) for row in rows))
    found = {(row["provider"], row["norm"], row["shape"], row["dtype"]): row for row in rows}
    body = []
    for provider, norm in dict.fromkeys((row["provider"], row["norm"]) for row in rows):
        mine = [found[provider, norm, *place] for place in places]
        cells = [f"{r['ratio']} ({r['low']}-{r['high']}; {float(r['ceiling']):.0%})" for r in mine]
        target = mine[0].get("target", "")
        worst = max(float(r["ratio"]) for r in mine)
        noisy = any(obstacle(float(r["noise"]), int(r["rounds"])) for r in mine if r.get("noise"))
        gap = (
            ""
            if not target
            else "too noisy"
            if noisy
            else "met"
            if worst <= float(target)
            else f"x{worst / float(target):.2f}"
        )
        body.append([f"{provider} `{norm}`", *cells, *([target, gap] if "target" in rows[0] else [])])
    head = ["norm", *(f"{shape.replace('x', ' x ')} {kind}" for shape, kind in places)]
    return table([*head, "target", "worst gap"] if "target" in rows[0] else head, body)


def bandwidth(rows: list[dict], dtype: str) -> str:
    """Shares of a copy's bandwidth, forward and backward, for each shape."""
    rows = [row for row in rows if row["dtype"] == dtype]
    places = list(dict.fromkeys((row["rows"], row["channels"]) for row in rows))
    found = {(row["run"], row["side"], row["rows"], row["channels"]): row for row in rows}

    def cell(run: str, place: tuple[str, str]) -> str:
        sides = [found.get((run, side, *place)) for side in ("forward", "backward")]
        return " + ".join(f"{float(row['of_ceiling']):.0%}" if row else "-" for row in sides)

    body = []
    for run in dict.fromkeys(row["run"] for row in rows):
        norm, who = run.split(maxsplit=1)
        body.append([f"{'normkit' if who == 'ours' else who} `{norm}`", *(cell(run, place) for place in places)])
    return table(["kernels", *(" x ".join(place) for place in places)], body)


def gpu_steps(rows: list[dict], base: str = "layer, reference") -> str:
    """Time of training steps on a GPU in ms, and relative to that with PyTorch's LayerNorm."""
    found = {(row["model"], row["precision"], row["norm"]): float(row["ms"]) for row in rows}
    places = list(dict.fromkeys((model, precision) for model, precision, _ in found))
    body = []
    for norm in dict.fromkeys(row["norm"] for row in rows):
        cells = [f"{found[*at, norm]:.1f} ({found[*at, norm] / found[*at, base]:.2f})" for at in places]
        body.append([f"`{norm.split(',')[0]}`{', in plain PyTorch' if ',' in norm else ''}", *cells])
    return table(["norm", *(f"{model}, {precision}" for model, precision in places)], body)


def counts(rows: list[dict]) -> str:
    """Counts of forward + backward, without and with a mask."""
    found = {(row["norm"], row["mask"], row["pass"]): row for row in rows}

    def both(norm: str, what: str, mask: str = "") -> str:
        sides = [found.get((norm, mask, side)) for side in ("forward", "backward")]
        return " + ".join(row[what] for row in sides if row)

    kinds = {
        "operations": "operations", "moves": "moves", "flops": "FLOPs per element",
        "fused_operations": "operations without a compiler", "fused_moves": "moves without a compiler",
        "launches": "launches on a GPU",
    }  # fmt: skip
    masked = {"moves": "moves with a mask", "fused_moves": "moves with a mask, without a compiler"}
    body = [[f"`{n}`", *(both(n, kind) for kind in kinds), *(both(n, kind, "masked") for kind in masked)]
            for n in dict.fromkeys(row["norm"] for row in rows)]  # fmt: skip
    return table(["norm", *kinds.values(), *masked.values()], body)


def blocks(rows: list[dict]) -> str:
    """Ratios of compiled blocks."""
    body = []
    for r in rows:
        spread = f"{r['low']}-{r['high']}"
        body.append([f"`{r['norm']}`", r["shape"].replace("x", " x "), r["dtype"], r["ms"], r["ratio"], spread])
    return table(["norm", "shape", "type", "ms", "ratio", "20th to 80th percentile"], body)


def steps(rows: list[dict]) -> str:
    """Ratios of training steps, eager and compiled."""
    found = {(row["norm"], row["compiled"]): row for row in rows}
    body = []
    for norm in dict.fromkeys(row["norm"] for row in rows):
        line = [f"`{norm}`"]
        for compiled in ("False", "True"):
            row = found.get((norm, compiled))
            line += [row["ms"], f"{row['ratio']} ({row['low']}-{row['high']})"] if row else ["", ""]
        body.append(line)
    return table(["norm", "ms", "ratio", "ms, compiled", "ratio, compiled"], body)


def pieces(rows: list[dict]) -> str:
    """Ratios of bare calls to LayerNorm's for each shape and type."""
    places = list(dict.fromkeys((row["shape"], row["dtype"]) for row in rows))
    found = {(row["pass"], row["norm"], row["how"], row["shape"], row["dtype"]): row for row in rows}
    body = []
    for key in dict.fromkeys((row["pass"], row["norm"], row["how"]) for row in rows):
        mine = [found[*key, *place] for place in places]
        moves = ", ".join(dict.fromkeys(row["moves"] for row in mine))
        cells = [f"{row['ratio']} ({row['low']}-{row['high']})" for row in mine]
        body.append([*key, moves, *cells, mine[0]["target"]])
    head = [f"{shape.replace('x', ' x ')} {kind}" for shape, kind in places]
    return table(["pass", "norms", "how", "moves", *head, "target"], body)


def read(name: str) -> list[dict]:
    """The rows of a result file; none where it was not measured."""
    path = RESULTS / f"{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf8").splitlines())) if path.exists() else []


def filled(page: str) -> str:
    """Replace every table between its marks in the page."""
    made = {"counts": counts(read("counts"))}
    if ops := read("ops_cpu"):
        made |= {
            "train": times(ops, "train"),
            "inference": times(ops, "inference"),
            "machine": "{device}, threads: {threads}, PyTorch {torch}".format(**ops[0]),
        }
    if norms := read("h200/norms"):
        made |= {"gpu train": times(norms, "train"), "gpu inference": times(norms, "inference")}
    if rows := read("h200/speed"):
        made |= {f"gpu {dtype}": bandwidth(rows, dtype) for dtype in ("bf16", "fp32")}
    if rows := read("h200/steps"):
        made["gpu steps"] = gpu_steps(rows)
    if rows := read("blocks_cpu"):
        made["blocks"] = blocks(rows)
    if rows := read("steps_cpu") + read("steps_compiled_cpu"):
        made["steps"] = steps(rows)
    if rows := read("pieces_cpu"):
        made["pieces"] = pieces(rows)
    for name, text in made.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        page = f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf8")), encoding="utf8")
