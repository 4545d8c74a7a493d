"""Fold a checkpoint of a language model with random weights, and measure memory and time.

    python benchmarks/language_models.py /tmp/llama --size 3b

makes the checkpoint once, folds it with `normkit fold`, and prints one row of CSV: the peak resident set, the time,
and the times of its bounds, a copy of the files and a forward of a short example by transformers alone. Each is
measured in a process of its own, so that the peaks are apart.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},  # Llama 3.2, 3B
}  # fmt: skip
SHARD = 2 << 30  # bytes


def make(folder: Path, size: str) -> None:
    """Write a Llama with random weights in bfloat16, shard by shard."""
    import torch
    from safetensors.torch import save_file

    from normkit.models.huggingface import import_transformers

    transformers = import_transformers()
    config = transformers.LlamaConfig(
        **SIZES[size], tie_word_embeddings=True, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    shards: list[list[str]] = [[]]
    for name in shapes:
        if sum(2 * shapes[each].numel() for each in [*shards[-1], name]) > SHARD and shards[-1]:
            shards.append([])
        shards[-1].append(name)
    folder.mkdir(parents=True)
    index, generator = {}, torch.Generator().manual_seed(0)
    for k, names in enumerate(shards, 1):
        file = f"model-{k:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            drawn = torch.empty(shapes[name], dtype=torch.bfloat16)
            tensors[name] = drawn.uniform_(0.5, 1.5, generator=generator) if drawn.dim() == 1 else (
                drawn.normal_(0, shapes[name][-1] ** -0.5, generator=generator))  # fmt: skip
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    config.save_pretrained(folder)
    total = {"total_size": sum(2 * shape.numel() for shape in shapes.values())}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}))


def forward(folder: Path, size: str) -> None:
    """Print the seconds of one forward of a short example."""
    import torch

    from normkit.models.huggingface import import_transformers

    model = import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.arange(16).view(2, 8) + 3
    with torch.no_grad():
        model(ids)
        start = time.perf_counter()
        model(ids)
    print(time.perf_counter() - start)


STEPS = {"make": make, "forward": forward}


def measured(*command: str) -> tuple[float, float, str]:
    """Run a command: its seconds, its peak resident set in GB, and its output."""
    start = time.perf_counter()
    code = "import resource,subprocess,sys;r=subprocess.run(sys.argv[1:],stdout=subprocess.PIPE,text=True);"
    code += "print(r.stdout);print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss);sys.exit(r.returncode)"
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True)
    *out, peak = done.stdout.split("\n")[:-1]
    return time.perf_counter() - start, int(peak) / 1e6, "\n".join(out)


def main() -> None:
    """Measure, and print one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--step", choices=STEPS, help="one step, in this process")
    args = parser.parse_args()
    if args.step:
        STEPS[args.step](args.folder, args.size)
        return
    this = (sys.executable, __file__, str(args.folder), "--size", args.size, "--step")
    if not args.folder.exists():
        subprocess.run([*this, "make"], check=True)
    out = args.folder.with_name(args.folder.name + "-folded")
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    shutil.copytree(args.folder, out)
    subprocess.run(["sync"], check=True)
    copied = time.perf_counter() - start
    shutil.rmtree(out)
    seconds, peak, _ = measured(sys.executable, "-m", "normkit_papers.cli", "fold", str(args.folder), "--out", str(out))
    _, _, one = measured(*this, "forward")
    limit = 5 * copied + 2 * float(one)
    row = {"model": args.size, "peak_gb": peak, "fold_s": seconds, "copy_s": copied, "forward_s": float(one)}
    writer = csv.DictWriter(sys.stdout, [*row, "limit_s"])
    writer.writeheader()
    writer.writerow({key: value if isinstance(value, str) else round(value, 2) for key, value in
                     (row | {"limit_s": limit}).items()})  # fmt: skip


if __name__ == "__main__":
    main()
