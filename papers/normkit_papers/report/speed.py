"""Timings of norms as a table and as figures: ratios to LayerNorm, and bandwidth."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit._util import align
from normkit_papers.report import canvas

Rows = Sequence[dict[str, Any]]
NEEDED = {  # kind of file -> columns that identify it
    "ratios": {"provider", "norm", "pass", "shape", "dtype", "ms", "low", "ratio", "high"},
    "pieces": {"norm", "pass", "how", "shape", "dtype", "ms", "low", "ratio", "high"},
    "blocks": {"norm", "shape", "dtype", "ms", "low", "ratio", "high"},
    "bandwidth": {"rows", "channels", "dtype", "side", "run", "ms", "of_ceiling"},
}


def read(path: Path) -> dict[str, list[dict[str, str]]]:
    """Read rows of timings by their kind, from a file or all files of a folder.

    Other CSV files of a folder are ignored. ValueError if there are no timings.
    """
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    found: dict[str, list[dict[str, str]]] = {}
    for file in sorted(path.rglob("*.csv")) if path.is_dir() else [path]:
        try:
            with file.open(encoding="utf8", newline="") as text:
                rows = list(csv.DictReader(text))
        except (UnicodeDecodeError, csv.Error):
            continue
        kind = next((k for k, needed in NEEDED.items() if rows and needed <= set(rows[0])), None)
        if kind and all(_numbers(row, NEEDED[kind]) for row in rows):
            found.setdefault(kind, []).extend(rows)
    if not found:
        raise ValueError(f"{path} holds no timings; `normkit bench --out FOLDER` and benchmarks/*.py write such files")
    return found


def _numbers(row: dict[str, str], needed: set[str]) -> bool:
    """Return True if the numbers of a row can be read; noise needs the number of rounds, too."""
    noise = {"noise", "rounds"} if row.get("noise") else set[str]()
    try:
        whole = all(int(row[k]) > 0 for k in (needed | noise) & {"channels", "rounds"})
        return whole and all(float(row[k]) >= 0 for k in needed & {"ms", "low", "ratio", "high", "of_ceiling"} | noise)
    except (KeyError, TypeError, ValueError):
        return False


def case(row: dict[str, Any]) -> tuple[str, str, str]:
    """(pass, shape, type) of a row."""
    return row.get("pass", "block"), row["shape"], row["dtype"]


def name(row: dict[str, Any]) -> str:
    """Label of a row: the norm, and the kernel or library unless that is the default."""
    how = row.get("how") or row.get("provider", "normkit")
    return row["norm"] if how == "normkit" or row["norm"].startswith("nn.") else f"{row['norm']} ({how})"


def table(rows: Rows) -> str:
    """Format ratios to LayerNorm: a line a norm, a column for each pass, shape and type.

    >>> row = {"norm": "rms", "shape": "8x4", "dtype": "float32", "ms": 1, "low": 0.9, "ratio": 1, "high": 1.25}
    >>> print(table([row]))
    time over nn.LayerNorm's (20th to 80th percentile)
         block 8x4 float32
    rms  1.00 (0.90-1.25)
    """
    heads = list(dict.fromkeys(map(case, rows)))
    cells = {(name(row), *case(row)): row for row in rows}
    lines = [["", *(" ".join(head) for head in heads)]]
    for norm in dict.fromkeys(map(name, rows)):
        line = [norm]
        for head in heads:
            row = cells.get((norm, *head))
            line.append(f"{float(row['ratio']):.2f} ({float(row['low']):.2f}-{float(row['high']):.2f})" if row else "")
        lines.append(line)
    return "\n".join(["time over nn.LayerNorm's (20th to 80th percentile)", align(lines)])


def ratios(rows: Rows, path: str | Path) -> Path:
    """Draw `table`: a panel for each pass, shape and type, a point for each norm."""
    path = canvas.figure_path(path)
    heads = list(dict.fromkeys(map(case, rows)))
    norms = list(dict.fromkeys(name(row) for row in rows if not row["norm"].startswith("nn.")))
    with canvas.style():
        wide = min(len(heads), 4)
        tall = -(-len(heads) // wide)
        figure = canvas.figure(1.2 + 2.6 * wide, (0.8 + 0.22 * len(norms)) * tall)
        for number, head in enumerate(heads):
            axes = figure.add_subplot(tall, wide, number + 1)
            for row in rows:
                if case(row) == head and name(row) in norms:
                    height = norms.index(name(row))
                    low, middle, high = (float(row[k]) for k in ("low", "ratio", "high"))
                    axes.plot((low, high), (height, height), color=canvas.COLOURS[0], linewidth=1.5)
                    axes.plot(middle, height, "o", color=canvas.COLOURS[0], markersize=4)
            axes.axvline(1, color=canvas.INK, linewidth=0.8)
            axes.set_yticks(range(len(norms)), map(canvas.safe, norms) if number % wide == 0 else [""] * len(norms))
            axes.set(title=canvas.safe(" ".join(head)), ylim=(len(norms) - 0.5, -0.5))
            axes.set_xlim(left=0)
        figure.supxlabel("time over nn.LayerNorm's", fontsize=9)
        return canvas.save(figure, path)


def bandwidth(rows: Rows, path: str | Path) -> Path:
    """Draw the fraction of a copy's bandwidth by channels, the best over numbers of rows.

    One line for each implementation. A norm with several implementations has a panel of its own, the others share one,
    for each pass and type.
    """
    path = canvas.figure_path(path)
    heads = list(dict.fromkeys((row["side"], row["dtype"]) for row in rows))
    runs = list(dict.fromkeys(row["run"] for row in rows))
    norms = [run.partition(" ")[0] for run in runs]
    groups: dict[str, list[str]] = {}
    for norm, run in zip(norms, runs, strict=True):
        groups.setdefault(norm if norms.count(norm) > 1 else "", []).append(run)
    with canvas.style():
        figure = canvas.figure(4.4 * len(heads), 3.0 * len(groups))
        for number, (group, head) in enumerate((g, h) for g in groups.values() for h in heads):
            axes = figure.add_subplot(len(groups), len(heads), number + 1)
            ends = []
            for place, run in enumerate(group):
                best: dict[int, float] = {}
                for row in rows:
                    if (row["side"], row["dtype"]) == head and row["run"] == run:
                        width = int(row["channels"])
                        best[width] = max(best.get(width, 0.0), float(row["of_ceiling"]))
                if best:
                    line = sorted(best.items())
                    axes.plot(*zip(*line, strict=True), marker="o", markersize=3, **canvas.line_style(place))
                    ends.append((line[-1][1], run, canvas.line_style(place)))
            axes.set(title=canvas.safe(" ".join(head)), xscale="log", yscale="log", xlabel="channels")
            axes.set_ylabel("fraction of a copy's bandwidth" if number % len(heads) == 0 else "")
            widths: list[int] = []
            for width in sorted({int(row["channels"]) for row in rows}):
                widths += [width] if not widths or width > 1.4 * widths[-1] else []
            axes.set_xticks(widths, [str(width) for width in widths])
            axes.minorticks_off()
            canvas.ticks(axes)
            canvas.label_ends(axes, ends)
        return canvas.save(figure, path)
