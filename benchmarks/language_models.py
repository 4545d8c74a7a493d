"""Measure memory and time of folding a language model, and of auditing it.

    python benchmarks/language_models.py /tmp/llama --make 3b
    python benchmarks/language_models.py /tmp/smollm2 --runs "normkit fold" "normkit audit" "fold()"
    python benchmarks/language_models.py /tmp/neox --make neox --runs "to_rms()"

`--make` writes a checkpoint with random weights first, if there is none. Each run has a process of its own. Rows go to
benchmarks/results/language_models.csv: the peak resident set, what stays resident after a function of Python, whose
result is dropped, and the seconds, with those of a forward of the same example. The limit of `normkit fold` is five
times a copy of the files, written to the disk, and two forwards in float64, as it verifies its result.
"""

import argparse
import gc
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rows

LLAMA = {"architecture": "Llama", "tie_word_embeddings": True, "dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "3b": {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},  # Llama 3.2, 3B
    "neox": {"architecture": "GPTNeoX", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
             "num_attention_heads": 12, "dtype": "float32"},  # Pythia, 160M
}  # fmt: skip
SHARD = 2 << 30  # bytes
RUNS = ("normkit fold", "normkit audit", "fold()", "fold() bfloat16", "to_rms()")
COLUMNS = (
    "model", "run", "files_gb", "peak_gb", "stays_gb", "seconds", "copy_s", "forward_s", "limit_s", "device", "threads",
    "torch", "commit", "command",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "language_models.csv"


def make(folder: Path, size: str) -> None:
    """Write a model with random weights and gains, shard by shard."""
    import torch
    from safetensors.torch import save_file

    from normkit.models.huggingface import import_transformers

    transformers, given = import_transformers(), dict(SIZES[size])
    kind = getattr(transformers, f"{given.pop('architecture')}ForCausalLM")
    config, dtype = kind.config_class(**given, architectures=[kind.__name__]), getattr(torch, given["dtype"])
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in kind(config).named_parameters()}
    shards: list[list[str]] = [[]]
    for name in shapes:
        if sum(dtype.itemsize * shapes[each].numel() for each in [*shards[-1], name]) > SHARD and shards[-1]:
            shards.append([])
        shards[-1].append(name)
    folder.mkdir(parents=True)
    index, generator = {}, torch.Generator().manual_seed(0)
    for k, names in enumerate(shards, 1):
        file = f"model-{k:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            drawn = torch.empty(shapes[name], dtype=dtype)
            tensors[name] = drawn.uniform_(0.5, 1.5, generator=generator) if drawn.dim() == 1 else (
                drawn.normal_(0, shapes[name][-1] ** -0.5, generator=generator))  # fmt: skip
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    config.save_pretrained(folder)
    total = {"total_size": sum(dtype.itemsize * shape.numel() for shape in shapes.values())}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}))


def forward(folder: Path) -> dict[str, float]:
    """Measure the products of a forward of a short example in float64; each weight is read in its turn."""
    import torch
    from safetensors import safe_open

    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dictionary)
                if (weight := tensors.get_tensor(name)).dim() == 2:
                    weight.float().double() @ torch.ones(weight.shape[1], 16, dtype=torch.float64)
    return {"forward_s": time.perf_counter() - start}


def in_python(folder: Path, run: str) -> dict[str, float]:
    """Measure a function on a model in float32 or bfloat16, without the loading."""
    import torch

    import normkit
    from normkit.fold.folders import example_for
    from normkit.models.huggingface import load_pretrained

    run, _, dtype = run.partition("() ")
    model = load_pretrained(folder).to(getattr(torch, dtype or "float32"))
    example = example_for(model)
    with torch.no_grad():
        model(example["input_ids"])
        start = time.perf_counter()
        model(example["input_ids"])
        forward = time.perf_counter() - start
    gc.collect()
    gc.disable()  # what only the garbage collector frees counts
    held = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = time.perf_counter()
    result = getattr(normkit, run.removesuffix("()"))(model, **example)
    seconds, peak = time.perf_counter() - start, _status("VmHWM")
    del result
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "files_gb": size / 1e9, "peak_gb": peak, "stays_gb": _resident() - held, "seconds": seconds,
        "forward_s": forward,
    }  # fmt: skip


def _resident() -> float:
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)  # free memory that the C library keeps
    return _status("VmRSS")


def _status(key: str) -> float:
    """A number of this process in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / 1e9


def command(folder: Path, run: str) -> dict[str, float]:
    """Measure a command on a folder; what it writes is flushed to the disk."""
    out = folder.with_name(folder.name + "-folded")
    shutil.rmtree(out, ignore_errors=True)
    name = run.split()[1]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "normkit.cli", name, str(folder), *(["--out", str(out)] if name == "fold" else [])],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(out, ignore_errors=True)
    return {"peak_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, "seconds": seconds}


def copy(folder: Path) -> dict[str, float]:
    """Measure a copy of the files."""
    start = time.perf_counter()
    shutil.copytree(folder, out := folder.with_name(folder.name + "-copied"))
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return {"copy_s": seconds}


def measured(folder: Path, *step: str) -> dict[str, float]:
    """Run a step in a process of its own, and return what it measured."""
    line = [sys.executable, __file__, str(folder), "--step", *step]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


STEPS = {"make": make, "forward": forward, "copy": copy, "in_python": in_python, "command": command}


def main() -> None:
    """Measure, and write a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a model with safetensors")
    parser.add_argument("--make", choices=SIZES, help="the model to write there if the folder is missing")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["normkit fold", "normkit audit"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the rows (.csv)")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        name, *rest = args.step
        print(json.dumps(STEPS[name](args.folder, *rest)))
        return
    if args.make and not args.folder.exists():
        measured(args.folder, "make", args.make)
    import torch

    size = sum(file.stat().st_size for file in args.folder.glob("*.safetensors")) / 1e9
    for run in args.runs:
        row: dict[str, Any] = {"files_gb": size}
        if run == "normkit fold":
            row |= measured(args.folder, "copy") | measured(args.folder, "forward")
            row["limit_s"] = 5 * row["copy_s"] + 2 * row["forward_s"]
        row |= measured(args.folder, "in_python" if "()" in run else "command", run)
        row = {key: round(value, 3) for key, value in row.items()}
        about = {"device": rows.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        shown = f"python benchmarks/{Path(__file__).name} {args.folder.name}"
        shown += f" --make {args.make}" * bool(args.make) + f" --runs {shlex.quote(run)}"
        row |= {"model": args.make or args.folder.name, "run": run, "commit": rows.commit(), "command": shown, **about}
        print(row, flush=True)
        rows.keep(args.out, COLUMNS, ("model", "run"), [row])


if __name__ == "__main__":
    main()
