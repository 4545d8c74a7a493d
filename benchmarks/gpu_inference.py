"""Inference on a GPU with LayerNorm, UN, and UN folded.

    python benchmarks/gpu_inference.py            on a GPU; about half an hour
    python benchmarks/gpu_inference.py --dry      the script itself, on tiny models and a CPU

Runs benchmarks/swin.py (Swin-T and Mask R-CNN), then benchmarks/deploy.py in PyTorch, eager and compiled, and in
TensorRT where onnxruntime has it. Integers on TensorRT are open: it asks for symmetric scales, which `nk.export` does
not write.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> None:
    """Run both benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU, two rounds")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args(arguments)
    sys.path.insert(0, str(HERE))
    import deploy
    import swin

    out = ["--out", str(given.out)]
    if given.dry:
        swin.main(["--dry", "--runtimes", "eager", "--models", "swin_t", "--precisions", "fp32", *out])
        deploy.main(["--models", "tiny", "--runtimes", "eager", "--rounds", "2", "--no-memory", *out])
        return
    swin.main(out)
    runtimes = ["eager", "compiled", *(["tensorrt"] if has_tensorrt() else [])]
    models, batches = ["vit", "swin", "bert", "gpt2"], ["1", "8", "64"]
    shared = ["--device", "cuda", "--precisions", "float32", "bfloat16", "--batches", *batches, "--no-memory", *out]
    deploy.main(["--models", *models, "--runtimes", *runtimes, *shared])


def has_tensorrt() -> bool:
    """Return if onnxruntime can run TensorRT."""
    try:
        import onnxruntime
    except ImportError:
        return False
    return "TensorrtExecutionProvider" in onnxruntime.get_available_providers()


if __name__ == "__main__":
    main()
