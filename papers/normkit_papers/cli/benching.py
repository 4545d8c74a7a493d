"""The command `bench`: time of norms."""

import csv
import inspect
import io
from pathlib import Path
from typing import Literal

from normkit.text import align
from normkit_papers.cli.line import check_writable, command, write

KINDS = ("ratios", "blocks", "pieces")  # of files with ratios to LayerNorm
NORMS = ("layer", "rms", "scale", "power(groups=0)", "pnv", "batch", "un")

THREADS = 1024  # at most: PyTorch crashes if the system cannot start them
HELD = 12  # activations at a time: input, output, gradients, what norms keep, what empties the cache


@command
def bench(
    results: Path | None = None,
    /,
    norms: tuple[str, ...] = NORMS,
    shape: str = "4096x512",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    rounds: int = 60,
    threads: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    compiled: bool = False,
    explain: bool = False,
    out: Path | None = None,
) -> int:
    """Show the time of norms relative to nn.LayerNorm, measured here or read from files.

    Norms take turns, round by round, and a ratio is taken within a round; the median over rounds is shown, with
    the 20th and 80th percentile. Norms with a warm-up are measured after it. A note follows if the machine is too
    noisy for a verdict.

    Args:
        results: A file or folder of timings, as benchmarks/*.py and --out write; nothing is measured then.
        norms: Specs, as 'un(window=8)'.
        shape: Rows x channels.
        dtype: Type of the activations.
        rounds: How often each norm runs.
        threads: Threads of PyTorch; a single one is pinned to a core.
        device: Where to measure.
        compiled: Also each norm compiled by Inductor; needs a C++ compiler and some seconds a norm.
        explain: Count operations and memory instead of timing.
        out: Folder for picture and timings; nothing is written without it.
    """
    given = locals()
    if results is not None:
        defaults = {name: one.default for name, one in inspect.signature(bench).parameters.items()}
        if ignored := [f"--{name}" for name in defaults.keys() - {"results", "out"} if given[name] != defaults[name]]:
            raise ValueError(f"{results} is read and nothing measured: leave out {' and '.join(sorted(ignored))}")
        from normkit_papers.report import speed

        _show(speed.read(results), out, measured=False)
        return 0
    import torch

    from normkit_papers.norm_speed import DTYPES, measure
    from normkit_papers.norm_speed import explain as operations

    rows, dim = _shape(shape)
    for name, count in (("rounds", rounds), ("threads", threads)):
        if count < 1:
            raise ValueError(f"--{name} must be a whole number >= 1; got {count}")
    if threads > THREADS:
        raise ValueError(f"--threads must be at most {THREADS}; got {threads}")
    if explain and out is not None:
        raise ValueError("--explain measures nothing that could be written; leave out --out")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device; leave it out to measure on the CPU")
    if not norms:
        raise ValueError("--norms: name at least one, as --norms layer 'un(window=8)'")
    if out is not None:
        check_writable(out)
    try:  # reserves pages and touches none
        torch.empty(HELD, rows, dim, dtype=DTYPES[dtype], device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: more than an int64 can count
        raise ValueError(f"--shape {shape}: {HELD} such activations do not fit into memory; name fewer rows") from error
    if explain:
        write(_explained([row for spec in norms for row in operations(spec, rows, dim, dtype, device)]))
    else:
        measured = measure(norms, rows, dim, dtype, rounds, device, compiled, threads)
        _show({"ratios": measured}, out, measured=True)
    return 0


def _shape(text: str) -> tuple[int, int]:
    """Rows and channels.

    >>> _shape("4096x512")
    (4096, 512)
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--shape is rows x channels, as 4096x512; got {text!r}")
    return int(parts[0]), int(parts[1])


def _explained(rows: list[dict]) -> str:
    head = ("norm", "phase", "forward: ops", "moves", "backward: ops", "moves", "what ran")
    order = ("norm", "phase", "forward", "forward_touched", "backward", "backward_touched", "ran")
    lines = [head, *([str(row[key]) for key in order] for row in rows)]
    note = (
        "moves: memory that operations touch, in activations. native: kernels in C++; fused: PyTorch's own; "
        "reference: plain operations"
    )
    return "\n".join([align(lines), "", note])


def _show(found: dict[str, list[dict]], out: Path | None, measured: bool) -> None:
    from normkit.files import write_whole
    from normkit_papers.report import speed
    from normkit_papers.timing import obstacle

    tables = []
    for kind in KINDS:
        for shape in dict.fromkeys(row["shape"] for row in found.get(kind, [])):
            rows = [row for row in found[kind] if row["shape"] == shape]
            where = {
                key: ", ".join(dict.fromkeys(str(row.get(key, "?")) for row in rows)) for key in ("device", "threads")
            }
            tables.append(f"{kind}, device {where['device']}, threads {where['threads']}\n{speed.table(rows)}")
            tables += sorted({f"No verdict: {why}." for row in rows if row.get("noise")
                              and (why := obstacle(float(row["noise"]), int(row["rounds"])))})  # fmt: skip
    write("\n\n".join(tables) if tables else "no ratios there; --out FOLDER draws what is")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    made = [speed.ratios(found[kind], out / f"{kind}.svg") for kind in KINDS if kind in found]
    if "bandwidth" in found:
        made.append(speed.bandwidth(found["bandwidth"], out / "bandwidth.svg"))
    if measured:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(found["ratios"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found["ratios"])
        made.append(write_whole(out / "ratios.csv", text.getvalue().encode()))
    write("\n".join(f"wrote {path}" for path in made))
