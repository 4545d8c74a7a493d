"""Inference with LayerNorm, with UN, and with UN folded: float32, and 8-bit integers in three schemes.

    python benchmarks/deploy.py --models bert6 --threads 1 2       one model in onnxruntime, some minutes
    python benchmarks/deploy.py --models minilm --weights FOLDER --text FILE
                                                            FOLDER/layer is the original, FOLDER/un has UN, trained
    python benchmarks/deploy.py --models vit swin --runtimes eager compiled --device cuda

All variants of a model take turns in 60 rounds, and a ratio is taken within a round; its median is reported with the
20th and 80th percentile. LayerNorm and the others are compared in the same scheme. Schemes: float32; attention,
which is float32 with `fuse_attention=True`; tool, which is that after `onnxruntime.transformers.optimizer`; dynamic,
onnxruntime's dynamic quantization for each channel; int8-attention, which is that of the file with fused attention;
products, static quantization of products. `likeness` is the cosine of the outputs, averaged over tokens, to those of
the original, LayerNorm in float32; of random weights, to those of the same norm in float32. It is the mean over 64
windows of 64 tokens of the text.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import commit, keep, processor, quiet

SCHEMES = ("float32", "attention", "tool", "dynamic", "int8-attention", "products")
FUSED = ("LayerNormalization", "SkipLayerNormalization", "Attention", "MultiHeadAttention", "Gelu", "BiasGelu")
KEY = ("model", "runtime", "batch", "threads", "scheme", "norm")
COLUMNS = (
    *KEY, "ms", "ratio", "low", "high", "noise", "verdict", "likeness", "operations", "fused", "device", "torch",
    "commit",
)  # fmt: skip


@dataclass
class Subject:
    """A model with LayerNorm and UN, and how to call them.

    Attributes:
        norms: Models by "layer", "un" and "folded".
        inputs: `inputs(batch)` makes keyword arguments of the models.
        batches: Calibration batches.
        trained: True if the weights are trained, so that outputs can be compared with the original's.
        kind: Architecture of onnxruntime's optimizer; its heads and width.
    """

    norms: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]
    batches: list[dict[str, Any]]
    trained: bool = False
    kind: tuple[str, int, int] = ("bert", 0, 0)


def used(out: Any) -> Any:
    """The part of an output that is used; a norm whose output is used stays."""
    return out if hasattr(out, "shape") else out.logits if hasattr(out, "logits") else out.last_hidden_state


def make(name: str, weights: Path | None, text: Path | None) -> Subject:
    """A model of MODELS, with random statistics, gains and biases unless weights are given."""
    import torch

    import normkit as nk

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from torchvision_stub import load_torchvision

    load_torchvision()  # timm and transformers import it
    torch.manual_seed(0)
    model, inputs, kind = MODELS[name](weights)
    if weights is not None:
        inputs = windows(weights / "layer", text)
    trained = weights is not None and (weights / "un").is_dir()
    un = nk.load_pretrained(weights / "un") if trained else nk.convert(model, "un").eval()
    for module in [] if trained else un.modules():
        if isinstance(module, nk.Norm):
            module.running.uniform_(0.5, 1.5)
    batches = [inputs(1) for _ in range(16)]
    folded, report = nk.fold(un, outputs=used, other_shapes=False, **inputs(2))
    print(f"{name}: {report.foldable} norms folded", flush=True)
    return Subject({"layer": model, "un": un, "folded": folded}, inputs, batches, trained, kind)


def bert(weights: Path | None, tokens: int, **sizes: int) -> Any:
    """BERT, post-norm: random weights, or those of `weights/layer`."""
    import torch
    import transformers

    if weights is not None:
        model = transformers.AutoModel.from_pretrained(weights / "layer", add_pooling_layer=False)
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
    config = model.config

    def inputs(batch: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(1000, config.vocab_size, (batch, tokens))}

    return model.eval(), inputs, ("bert", config.num_attention_heads, config.hidden_size)


def windows(folder: Path, text: Path | None, tokens: int = 64) -> Callable[[int], dict[str, Any]]:
    """Return a function that draws windows of a text, as arguments of a model."""
    import torch
    import transformers

    if text is None:
        raise SystemExit("--weights needs --text FILE: the outputs of trained weights are compared on real text")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer(text.read_text(encoding="utf8"), add_special_tokens=False, verbose=False)["input_ids"]
    rows = torch.tensor(words[: len(words) // (tokens - 2) * (tokens - 2)]).view(-1, tokens - 2)
    ends = [torch.full((len(rows), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    rows = torch.cat([ends[0], rows, ends[1]], 1)
    return lambda batch: {"input_ids": rows[torch.randint(len(rows), (batch,))]}


def picture(name: str, heads: int, width: int) -> Any:
    """A classifier of timm with random weights, pictures of 224."""
    import timm
    import torch

    model = timm.create_model(name).eval()
    return model, lambda batch: {"x": torch.randn(batch, 3, 224, 224)}, ("vit", heads, width)


SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS: dict[str, Callable[[Path | None], Any]] = {
    "bert6": lambda _: bert(None, 64, **SMALL),
    "minilm": lambda weights: bert(weights, 64, **SMALL),
    "bert": lambda _: bert(None, 128),
    "vit": lambda _: picture("vit_small_patch16_224", 6, 384),
    "swin": lambda _: picture("swin_tiny_patch4_window7_224", 0, 0),
    "tiny": lambda _: bert(None, 8, **TINY),
}


def write(subject: Subject, norm: str, scheme: str, batch: int, folder: Path) -> Path:
    """Export one variant; the integers and the optimizer's graph are made from the float file."""
    import normkit as nk
    from normkit.models.quantize import quantize

    path = folder / f"{norm}-{scheme}.onnx"
    if path.exists():
        return path
    if scheme in ("float32", "attention"):
        options: dict[str, Any] = {"dynamic": False, "tolerance": 1e-3, "fuse_attention": scheme == "attention"}
        nk.export(subject.norms[norm], path, outputs=used, **options, **subject.inputs(batch))
        return path
    source = write(subject, norm, "attention" if scheme in ("tool", "int8-attention") else "float32", batch, folder)
    if scheme == "tool":
        from onnxruntime.transformers import optimizer

        kind, heads, width = subject.kind
        optimizer.optimize_model(str(source), kind, heads, width, opt_level=0).save_model_to_file(str(path))
    elif scheme in ("dynamic", "int8-attention"):
        quantize(source, path, None)
    else:
        calls = [subject.inputs(batch) for _ in range(4)] if batch > 1 else subject.batches
        feeds = [{name: t.numpy() for name, t in call.items()} for call in calls]
        quantize(source, path, feeds)
    return path


def session(path: Path, threads: int, optimized: Path | None = None) -> Any:
    """An onnxruntime session; `optimized` keeps the graph after its own fusions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    if optimized:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def compare(name: str, runtime: str, batch: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model in one runtime; all variants take turns, once for each number of threads."""
    import torch

    from normkit.bench import measure

    subject, rows = make(name, given.weights, given.text), []
    inputs = subject.inputs(batch)
    schemes = given.schemes if runtime == "onnxruntime" else ["float32"]
    variants = [(norm, scheme) for norm in given.norms for scheme in schemes]
    with tempfile.TemporaryDirectory() as scratch:
        if runtime == "onnxruntime":
            folder = Path(scratch) if given.files is None else given.files / f"{name}-{batch}"
            folder.mkdir(parents=True, exist_ok=True)
            files = {each: write(subject, *each, batch, folder) for each in variants}
            about = described(subject, files, [subject.inputs(batch) for _ in range(64 if subject.trained else 1)])
        for threads in given.threads:
            if runtime == "onnxruntime":
                calls = {each: _in_onnxruntime(session(file, threads), inputs) for each, file in files.items()}
            else:
                calls = {each: _in_torch(subject.norms[each[0]], inputs, runtime, given.device) for each in variants}
                about = {each: {} for each in variants}
            timings = measure({" ".join(each): call for each, call in calls.items()}, given.rounds, threads=threads,
                              device=given.device)  # fmt: skip
            for norm, scheme in variants:
                own, base = f"{norm} {scheme}", f"{given.norms[0]} {scheme}"
                found = timings.ratio(own, base)
                rows.append({
                    "model": name, "runtime": runtime, "batch": batch, "threads": threads, "scheme": scheme,
                    "norm": norm, "ms": round(1e3 * timings.median(own), 3), "ratio": round(found.median, 3),
                    "low": round(found.low, 3), "high": round(found.high, 3), "noise": round(timings.noise, 3),
                    "verdict": timings.obstacle or "ok", **about[norm, scheme], "device": _device(given.device),
                    "torch": torch.__version__, "commit": commit(),
                })  # fmt: skip
    return rows


def described(subject: Subject, files: dict[tuple[str, str], Path], tried: list[dict[str, Any]]) -> dict[Any, dict]:
    """Operations and fusions of each file as onnxruntime runs it, and the likeness of its outputs."""
    import onnx
    import torch

    about, outputs = {}, dict[tuple[str, str], Any]()
    for (norm, scheme), path in files.items():
        run = session(path, 1, optimized := path.with_suffix(".run.onnx"))
        graph = Counter(node.op_type for node in onnx.load(optimized).graph.node)
        fused = "; ".join(f"{graph[kind]} {kind}" for kind in FUSED if graph[kind])
        about[norm, scheme] = row = {"operations": sum(graph.values()), "fused": fused}
        outputs[norm, scheme] = torch.stack([pooled(_in_onnxruntime(run, each)()[0]) for each in tried])
        like = outputs.get(("layer" if subject.trained else norm, "float32"))
        if like is not None:
            row["likeness"] = round(float(torch.cosine_similarity(outputs[norm, scheme], like, dim=1).mean()), 4)
    return about


def pooled(output: Any) -> Any:
    """The mean over the tokens of `[batch, tokens, channels]`, or the whole output, in float64."""
    import torch

    out = torch.from_numpy(output).double()
    return (out.mean(1) if out.dim() == 3 else out).flatten()


def _in_onnxruntime(run: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    feed = {slot.name: inputs[slot.name].numpy() for slot in run.get_inputs()}
    return lambda: run.run(None, feed)


def _in_torch(model: Any, inputs: dict[str, Any], runtime: str, device: str) -> Callable[[], Any]:
    import torch

    made = torch.compile(model.to(device)) if runtime == "compiled" else model.to(device)
    moved = {key: tensor.to(device) for key, tensor in inputs.items()}

    def call() -> Any:
        with torch.inference_mode():
            return made(**moved)

    return call


def _device(device: str) -> str:
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    about = Path("/proc/cpuinfo")
    vnni = about.exists() and "vnni" in about.read_text(encoding="utf8")
    return f"{processor()}{', VNNI' if vnni else ''}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert6"], choices=MODELS)
    parser.add_argument("--runtimes", nargs="+", default=["onnxruntime"], choices=("onnxruntime", "eager", "compiled"))
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES], choices=SCHEMES)
    parser.add_argument("--norms", nargs="+", default=["layer", "un", "folded"], help="ratios are to the first")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="one is pinned to a core")
    parser.add_argument("--rounds", type=int, default=60, help="fewer allow no verdict")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", type=Path, help="folder with layer/ and un/")
    parser.add_argument("--files", type=Path, help="folder to keep the exported files in; those that it holds are used")
    parser.add_argument("--text", type=Path, help="text on which trained weights are compared")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "deploy.csv")
    given = parser.parse_args(arguments)
    for name in given.models:
        for runtime in given.runtimes:
            for batch in given.batches:
                rows = compare(name, runtime, batch, given)
                keep(given.out, COLUMNS, KEY, rows)
                for row in rows:
                    print(f"  {row['threads']} {row['scheme']:14} {row['norm']:7} {row['ms']:9.3f} ms  "
                          f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})  "
                          f"likeness {row.get('likeness', '')}  {row.get('fused', '')}  {row['verdict']}",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    quiet()
    main()
