"""Time and memory of inference with LayerNorm, with UN, and with UN folded.

    python benchmarks/models.py [--models bert vit swin decode] [--rounds 30] [--show results/inference.json]

Runtimes: eager, compiled, onnxruntime. Shapes: BERT-base 1 x 128 tokens (post-norm), ViT-S/16 and Swin-T on 2 images of
224, GPT-2 small on one token with an empty cache. Weights and statistics are random. The variants take turns, round by
round, so that a busy machine slows all of them; a ratio is taken within a round. The table has the median over rounds
with the 20th and 80th percentile. The main baseline is LayerNorm compiled. Memory is the peak of a separate process
above its memory with the model loaded.

Writes results/inference.json, and from it docs/inference.md; --show writes only the page.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

QUIET = {  # before Python starts: no spinning threads, no fresh pages for every tensor
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
}
NORMS = ("layer", "un", "folded")
RUNTIMES = ("compiled", "eager", "onnxruntime")
RATIOS = ("to_base", "to_layer")


def make(name: str):
    """A model with LayerNorm and an example of its input, by name."""
    import torch

    sys.modules.setdefault("torchvision", None)  # its build may be for another PyTorch; these models do without
    import transformers as hf

    torch.manual_seed(0)
    if name == "bert":
        model = hf.BertModel(hf.BertConfig(), add_pooling_layer=False)
        kwargs = {"input_ids": torch.randint(5, 30000, (1, 128))}
    elif name == "vit":
        config = hf.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
        model, kwargs = hf.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 224, 224)}
    elif name == "swin":
        model = hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000))
        kwargs = {"pixel_values": torch.randn(2, 3, 224, 224)}
    else:
        model = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, bos_token_id=1, eos_token_id=1))
        kwargs = {"input_ids": torch.randint(5, 50000, (1, 1))}
    return model.eval(), kwargs


def pick(out):
    """Return the part of an output that is used; a norm whose output is used stays."""
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def variant(name: str, norm: str):
    """A model with one of NORMS, and its example."""
    import torch

    from normkit.norms import StatNorm
    from normkit.transforms import convert, fold

    model, kwargs = make(name)
    if norm == "layer":
        return model, kwargs, ""
    model = convert(model, "un").eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StatNorm):
                module.running.uniform_(0.5, 1.5)
    if norm == "un":
        return model, kwargs, ""
    folded, report = fold(model, outputs=pick, untie=True, other_shapes=False, **kwargs)
    left = f", {n} multiply-add" if (n := report.count("multiply-add")) else ""
    return folded, kwargs, f"{report.foldable} folded{left}, {report.max_error:.0e}"


def runner(name: str, norm: str, runtime: str, scratch: Path) -> tuple[Callable[[], object], str]:
    """A call of no arguments that runs the variant once, and what was folded."""
    import torch

    model, kwargs, note = variant(name, norm)
    torch.set_grad_enabled(False)
    if runtime == "onnxruntime":
        import onnxruntime

        from normkit.transforms import export

        path = scratch / f"{name}-{norm}.onnx"
        export(model, path, outputs=pick, dynamic=False, **kwargs)
        del model
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {slot.name: kwargs[slot.name].numpy() for slot in session.get_inputs()}
        return lambda: session.run(None, feed), note
    if runtime == "compiled":
        compiled = torch.compile(model)
        return lambda: compiled(**kwargs), note
    return lambda: model(**kwargs), note


def compare(name: str, runtimes: list[str], rounds: int, scratch: Path) -> list[dict]:
    """Times of all variants of a model, taking turns."""
    calls, notes = {}, {}
    for norm in NORMS:
        for runtime in runtimes:
            calls[norm, runtime], notes[norm, runtime] = runner(name, norm, runtime, scratch)
            for _ in range(3):
                calls[norm, runtime]()
    import torch

    from normkit.lab.timing import measure

    timings = measure({" ".join(key): call for key, call in calls.items()}, rounds, threads=torch.get_num_threads())
    base = ("layer", "compiled" if "compiled" in runtimes else runtimes[0])
    rows = []
    for norm, runtime in calls:
        variant = f"{norm} {runtime}"
        row = {"model": name, "norm": norm, "runtime": runtime, "ms": 1000 * timings.median(variant), "n": rounds,
               "note": notes[norm, runtime]}  # fmt: skip
        for label, other in (("to_base", base), ("to_layer", ("layer", runtime))):
            found = timings.ratio(variant, " ".join(other))
            row[label] = {"of": " ".join(other), "median": found.median, "low": found.low, "high": found.high}
        rows.append(row)
    return rows


def memory(name: str, norm: str, runtime: str) -> dict[str, float]:
    """MB held with the model loaded, and the peak above that, in a process of its own."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import models; models.peak{(name, norm, runtime)!r}"
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}  # gives memory back
    command = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    return json.loads(out.stdout.splitlines()[-1])


def peak(name: str, norm: str, runtime: str) -> None:
    """Print the memory of one variant; run in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        call, _ = runner(name, norm, runtime, Path(scratch))
        call()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = status("VmRSS")
        call()
        print(json.dumps({"loaded_mb": before, "peak_mb": status("VmHWM") - before}))


def status(key: str) -> float:
    """A line of this process's status, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


TITLES = {
    "bert": "BERT-base, 1 x 128 tokens (post-norm)",
    "vit": "ViT-S/16, 2 images",
    "swin": "Swin-T, 2 images",
    "decode": "GPT-2 small, one token",
}
NAMES = {"layer": "LayerNorm", "un": "UN, not folded", "folded": "UN, folded"}
PAGE = """# Inference, folded

This page compares the inference time and memory of four models with LayerNorm, with `un`, and with `un` folded.
[Remove the norms before you deploy](guides/remove-norms.md) shows how to fold a model. Measure on your device with:

```
python benchmarks/models.py --models vit --rounds 30
```

{verdict} Nearly all time is spent in matrix products at these shapes.

Times are ratios: to LayerNorm compiled by `torch.compile`, and to LayerNorm in the same runtime. A cell has the median
over {n} rounds and, in brackets, the 20th and 80th percentile. A range that contains 1.00 is no clear difference.
Memory is the peak of a process above its memory with the model loaded.

{tables}

Written by `python benchmarks/models.py` from `results/inference.json`: {device}, {threads} threads, normkit {commit},
torch {torch}.
"""


def page(result: dict) -> str:
    """Format docs/inference.md from the result file."""
    parts = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == name]
        rows.sort(key=lambda r: (RUNTIMES.index(r["runtime"]), NORMS.index(r["norm"])))
        note = next(row["note"] for row in rows if row["norm"] == "folded")
        parts += [f"## {TITLES[name]}", "", f"{note} (largest error in float64).", "",
                  "| norm | runtime | to LayerNorm compiled | to LayerNorm, same runtime | memory, MB |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for row in rows:
            cells = [f"{row[k]['median']:.2f} ({row[k]['low']:.2f} to {row[k]['high']:.2f})" for k in RATIOS]
            held = f"{row['memory']['peak_mb']:.0f}" if row.get("memory") else "-"
            parts.append(f"| {NAMES[row['norm']]} | {row['runtime']} | {cells[0]} | {cells[1]} | {held} |")
        parts.append("")
    where = result["where"]
    return PAGE.format(device=where["device"], threads=result["threads"], n=result["rows"][0]["n"],
                       commit=where["commit"][:7], torch=where["torch"],
                       verdict=verdict(result["rows"]), tables="\n".join(parts).rstrip())  # fmt: skip


def verdict(rows: list[dict]) -> str:
    """Summarize where the folded model differs from LayerNorm in time and memory."""
    folded = [row for row in rows if row["norm"] == "folded"]
    clear = [f"{TITLES[row['model']]}, {row['runtime']}: {row['to_layer']['median']:.2f}" for row in folded
             if not row["to_layer"]["low"] <= 1 <= row["to_layer"]["high"]]  # fmt: skip
    time = f"differs clearly from LayerNorm in {'; '.join(clear)}" if clear else (
        "is neither clearly faster nor clearly slower than LayerNorm in the same runtime, in any row")  # fmt: skip
    sentences = [f"**Result: `un` folded {time}.**"]
    layer = {(row["model"], row["runtime"]): row["memory"]["peak_mb"] for row in rows
             if row["norm"] == "layer" and row.get("memory")}  # fmt: skip
    both = [(row, row["memory"]["peak_mb"], layer[row["model"], row["runtime"]]) for row in folded if row.get("memory")]
    if both:
        row, mine, base = max(both, key=lambda found: abs(found[1] - found[2]))
        where = f"{TITLES[row['model']]}, {row['runtime']}"
        sentences.append(f"Memory differs most for {where}: {mine:.0f} MB folded, {base:.0f} MB with LayerNorm.")
    return " ".join(sentences)


def table(rows: list[dict]) -> str:
    """Format all rows, the main baseline first."""
    head = f"{'model':8} {'norm':7} {'runtime':12} {'ms':>8}  {'to LayerNorm compiled':22} {'to LayerNorm likewise':22}"
    lines = [f"{head}  peak MB"]
    order = sorted(rows, key=lambda r: (r["model"], RUNTIMES.index(r["runtime"]), NORMS.index(r["norm"])))
    for r in order:
        cells = [f"{r[k]['median']:.3f} ({r[k]['low']:.3f} to {r[k]['high']:.3f})" for k in RATIOS]
        held = f"{r['memory']['peak_mb']:8.0f}" if r.get("memory") else ""
        name = f"{r['model']:8} {r['norm']:7} {r['runtime']:12}"
        lines.append(f"{name} {r['ms']:8.2f}  {cells[0]:22} {cells[1]:22} {held}  {r['note']}")
    return "\n".join(lines)


def main() -> None:
    if any(os.environ.get(key) != value for key, value in QUIET.items()):
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], {**os.environ, **QUIET})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert", "vit", "swin", "decode"])
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=RUNTIMES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/inference.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/inference.md"))
    parser.add_argument("--show", type=Path, help="a result file to make the page of, without measuring")
    given = parser.parse_args()
    if given.show:
        given.page.write_text(page(json.loads(given.show.read_text(encoding="utf8"))), encoding="utf8")
        return
    import torch

    from normkit.lab.train.environment import environment

    torch.set_num_threads(given.threads)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.models:
            found = compare(name, given.runtimes, given.rounds, Path(scratch))
            torch._dynamo.reset()
            for row in found:
                if not given.no_memory and row["runtime"] != "compiled":
                    row["memory"] = memory(name, row["norm"], row["runtime"])
            rows += found
            print(table(found), flush=True)
    result = {"what": __doc__.splitlines()[0], "rows": rows, "where": environment(), "threads": given.threads}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    given.page.write_text(page(result), encoding="utf8")


if __name__ == "__main__":
    main()
