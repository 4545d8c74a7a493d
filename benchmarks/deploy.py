"""Inference with LayerNorm, with UN, and with UN folded, in float32 and in 8-bit integers.

    python benchmarks/deploy.py --models vit --runtimes onnxruntime      one model, under five minutes on two cores
    python benchmarks/deploy.py --models minilm --weights FOLDER         trained weights: benchmarks/deploy_models.py
    python benchmarks/deploy.py --files FOLDER --prepare                 only write the files; later runs reuse them
    python benchmarks/deploy.py --show                                   the pages alone, from benchmarks/results
    python benchmarks/deploy.py --device cuda --runtimes eager compiled tensorrt

Each variant runs on one thread, pinned to a core. All variants of a model and a runtime take turns in 60 rounds, and a
ratio is taken within a round: its median is reported with the 20th and 80th percentile. Integers have two recipes,
matrix products alone and the residual stream too; every norm is compared in its fastest one. Memory is the peak of a
process of its own above what it takes before the model is loaded. Writes benchmarks/results/deploy-MODEL-RUNTIME.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUFFIXES = {"onnxruntime": ".onnx", "openvino": ".xml", "executorch": ".pte", "tensorrt": ".onnx"}
RUNTIMES = ("eager", "compiled", *SUFFIXES)
PRECISIONS = ["float32", "int8"]
RECIPES = {"float32": ("",), "int8": ("products", "stream"), "bfloat16": ("",)}
QUIET = {  # before Python starts: no spinning threads, one thread, no fresh pages for every tensor
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
}


def load(runtime: str, path: Path, feed: dict[str, Any], optimized: Path | None = None) -> Callable[[], Any]:
    """A call of no arguments that runs a file once on one thread."""
    if runtime in ("onnxruntime", "tensorrt"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if optimized:
            options.optimized_model_filepath = str(optimized)
        providers = ["TensorrtExecutionProvider"] if runtime == "tensorrt" else ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        given = {slot.name: feed[slot.name] for slot in session.get_inputs()}
        return lambda: session.run(None, given)
    if runtime == "openvino":
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
        compiled = openvino.compile_model(str(path), "CPU", settings)
        arrays = list(feed.values())
        return lambda: compiled(arrays)
    import torch
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    tensors = [torch.from_numpy(array) for array in feed.values()]
    return lambda: method.execute(tensors)


def running(runtime: str, path: Path, feed: dict[str, Any], exported: dict[str, int]) -> dict[str, int]:
    """Operations that run, after the runtime's own fusions where it shows them."""
    if runtime == "onnxruntime":
        import onnx

        optimized = path.with_suffix(".optimized.onnx")
        load(runtime, path, feed, optimized)
        return dict(Counter(node.op_type for node in onnx.load(optimized).graph.node))
    if runtime == "openvino":
        import openvino

        graph = openvino.compile_model(str(path), "CPU").get_runtime_model()
        kinds = [op.get_rt_info()["layerType"].astype(str) for op in graph.get_ops()]
        return dict(Counter(kind for kind in kinds if kind not in ("Input", "Output", "Const")))
    return exported


def write(subject: Any, name: str, norm: str, runtime: str, recipe: str, batch: int, folder: Path) -> dict[str, Any]:
    """Export one variant and describe the file; files that exist are used."""
    import numpy as np
    import torch
    from deploy_models import used

    from normkit.models import Exported, Int8, export

    path = folder / f"{name}-{batch}-{norm}-{recipe or 'float32'}{SUFFIXES[runtime]}"
    about = path.with_suffix(f".{runtime}.json")
    if about.exists():
        return json.loads(about.read_text(encoding="utf8"))
    model, note = subject.variant(norm)
    kwargs = subject.inputs(batch)
    feed = {key: tensor.numpy() for key, tensor in kwargs.items()}
    np.savez(path.with_suffix(".npz"), **feed)
    int8 = Int8(subject.batches(batch), recipe) if recipe else None
    if int8 and path.suffix == ".onnx":  # from the float file, so that a model is exported once
        in_float = Path(write(subject, name, norm, runtime, "", batch, folder)["path"])
        quantize(in_float, path, int8)
        found, expected = (torch.from_numpy(load(runtime, file, feed)()[0]).flatten() for file in (path, in_float))
        done = Exported(path, {}, runtime, 0.0, float(torch.cosine_similarity(found, expected, dim=0)))
    else:
        done = export(model, path, outputs=used, dynamic=False, tolerance=1e-3, int8=int8, **kwargs)
    operations = running(runtime, path, feed, done.operations)
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path
    row = {
        "path": str(path), "note": note, "cosine": done.cosine,
        "file_mb": round(weights.stat().st_size / 1e6, 2), "operations": sum(operations.values()),
        "outside": {op: n for op, n in operations.items() if runtime == "executorch"},
        "quantize": operations.get("QuantizeLinear", 0), "dequantize": operations.get("DequantizeLinear", 0),
    }  # fmt: skip
    about.write_text(json.dumps(row), encoding="utf8")
    return row


def quantize(in_float: Path, path: Path, int8: Any) -> None:
    """Quantize an ONNX file, as `nk.export(int8=...)` does after it has exported the model."""
    import onnx

    from normkit.models.quantize import quantize_onnx

    known = {slot.name for slot in onnx.load(in_float).graph.input}
    feeds = [{name: tensor.numpy() for name, tensor in batch.items() if name in known} for batch in int8.batches]
    quantize_onnx(in_float, path, feeds, int8)


def peak(runtime: str, path: str) -> float | None:
    """MB that loading and running a file takes at most, in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--peak", runtime, path]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain | {"NORMKIT_PEAK": "1"})
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def print_peak(runtime: str, path: Path) -> None:
    """Print the memory of loading and running a file."""
    import numpy as np

    if runtime == "executorch":
        from executorch.runtime import Runtime  # noqa: F401
    feed = dict(np.load(path.with_suffix(".npz")))
    __import__({"executorch": "torch", "tensorrt": "onnxruntime"}.get(runtime, runtime))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    load(runtime, path, feed)()
    print(status("VmHWM") - before)


def status(key: str) -> float:
    """A line of this process's status, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def vnni() -> bool:
    """Return True if the CPU has instructions for 8-bit integers (VNNI)."""
    about = Path("/proc/cpuinfo")
    return about.exists() and "vnni" in about.read_text()


def in_torch(subject: Any, norm: str, runtime: str, precision: str, batch: int, device: str) -> Callable[[], Any]:
    """A call of no arguments of the model in PyTorch."""
    import copy

    import torch

    model = subject.variant(norm)[0]
    model = copy.deepcopy(model).to(device) if device != "cpu" else model
    kwargs = {key: tensor.to(device) for key, tensor in subject.inputs(batch).items()}
    made = torch.compile(model) if runtime == "compiled" else model

    def call() -> Any:
        half = torch.autocast(device, torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
        with torch.inference_mode(), half:
            return made(**kwargs)

    return call


def compare(name: str, runtime: str, given: argparse.Namespace, folder: Path, batch: int) -> list[dict[str, Any]]:
    """Rows of one model in one runtime; all variants take turns."""
    import deploy_models
    import numpy as np
    import torch

    from normkit.bench import ROUNDS, measure

    subject = deploy_models.make(name, given.weights)
    norms = [norm for norm in given.norms if norm != "limited" or subject.spread]
    rows, calls = [], {}
    for precision in given.precisions:
        if (precision == "int8") == (runtime in ("eager", "compiled")) and precision != "float32":
            continue
        for recipe in [each for each in RECIPES[precision] if each in given.recipes or not each]:
            for norm in norms:
                row = {"model": name, "runtime": runtime, "batch": batch, "precision": precision, "recipe": recipe,
                       "norm": norm}  # fmt: skip
                if runtime in SUFFIXES:
                    row |= write(subject, name, norm, runtime, recipe, batch, folder)
                    feed = dict(np.load(Path(row["path"]).with_suffix(".npz")))
                    calls[label(row)] = load(runtime, Path(row["path"]), feed)
                else:
                    calls[label(row)] = in_torch(subject, norm, runtime, precision, batch, given.device)
                rows.append(row)
    if given.prepare:
        return []
    for call in calls.values():
        call()
    timings = measure(calls, given.rounds or ROUNDS, device="cpu" if runtime in SUFFIXES else given.device)
    for row in rows:
        alike = [other for other in rows if other["precision"] == row["precision"] and other["norm"] == row["norm"]]
        base = [other for other in rows if other["precision"] == row["precision"] and other["norm"] == "layer"]
        same = next(other for other in base if other["recipe"] == row["recipe"])
        best = min(base, key=lambda other: timings.median(label(other)))
        row |= {
            "ms": 1e3 * timings.median(label(row)),
            "to_same": vars(timings.ratio(label(row), label(same))),
            "to_best": vars(timings.ratio(label(row), label(best))),
            "is_best": row is min(alike, key=lambda other: timings.median(label(other))),
            "to_float": vars(timings.ratio(label(row), label(rows[0]))),
            "noise": timings.noise,
            "obstacle": timings.obstacle,
            "n": len(timings.repeated),
            "memory_mb": peak(runtime, row["path"]) if runtime in SUFFIXES and not given.no_memory else None,
        }
        row.pop("path", None)
    torch._dynamo.reset()
    return rows


def label(row: dict[str, Any]) -> str:
    """Name of a variant within a model and a runtime."""
    return f"{row['norm']} {row['recipe'] or row['precision']}"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert6"])
    parser.add_argument("--runtimes", nargs="+", default=["onnxruntime"], choices=RUNTIMES)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=RECIPES)
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES["int8"]], choices=RECIPES["int8"])
    parser.add_argument("--norms", nargs="+", default=["layer", "un", "folded", "limited"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, help="60 by default; fewer allow no verdict")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", type=Path, help="folder with trained models")
    parser.add_argument("--files", type=Path, help="folder that keeps the exported files")
    parser.add_argument("--prepare", action="store_true", help="export, measure nothing")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="write the pages from the results, measure nothing")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).parent))
    if given.peak:
        print_peak(given.peak[0], Path(given.peak[1]))
        return
    if given.show:
        import deploy_page

        deploy_page.write_pages(given.out)
        return
    import torch
    from normkit_papers.train.environment import environment

    torch.set_num_threads(1)
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        folder = given.files or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.models:
            for runtime in given.runtimes:
                for batch in given.batches:
                    start = time.perf_counter()
                    rows = compare(name, runtime, given, folder, batch)
                    if rows:
                        command = f"python benchmarks/deploy.py --models {name} --runtimes {runtime} --batches {batch}"
                        command += " --weights FOLDER" if given.weights else ""
                        command += f" --rounds {given.rounds}" if given.rounds else ""
                        if given.precisions != PRECISIONS:
                            command += f" --precisions {' '.join(given.precisions)}"
                        if len(given.recipes) < len(RECIPES["int8"]):
                            command += f" --recipes {' '.join(given.recipes)}"
                        where = environment() | {"vnni": given.device == "cpu" and vnni()}
                        keep(rows, given.out, name, runtime, batch, command, where)
                    print(f"{name}, {runtime}, batch {batch}: {time.perf_counter() - start:.0f} s", flush=True)


def keep(rows: list[dict], out: Path, name: str, runtime: str, batch: int, command: str, where: dict) -> None:
    """Write the result file of one model and runtime, and print its rows."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"deploy-{name}-{runtime}-{batch}.json"
    where = {key: where[key] for key in ("commit", "dirty", "torch", "device", "time", "vnni")}
    path.write_text(json.dumps({"command": command, "where": where, "rows": rows}, indent=1) + "\n", encoding="utf8")
    for row in rows:
        spans = ["{median:.3f} ({low:.3f} to {high:.3f})".format(**row[key]) for key in ("to_same", "to_best")]
        close = f"cosine {row['cosine']:.4f}" if row.get("cosine") else ""
        print(f"  {label(row):18} {row['ms']:9.2f} ms  same {spans[0]}  best {spans[1]}  {close} "
              f"{row.get('operations', '')} ops, {row.get('quantize', '')} Q, {row.get('dequantize', '')} DQ, "
              f"{row['memory_mb'] or 0:.0f} MB  {row['obstacle']}")  # fmt: skip


if __name__ == "__main__":
    if any(os.environ.get(key) != value for key, value in QUIET.items()) and "NORMKIT_PEAK" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], {**os.environ, **QUIET})
    if hasattr(os, "sched_setaffinity"):  # before a runtime starts its threads
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    main()
