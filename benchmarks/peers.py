"""Other implementations of LayerNorm and RMSNorm on a GPU, as functions of (x, w, b, eps).

Taken from torch, Liger 0.8, flash-attn 2.8, apex, quack 0.6 and torchnorm 0.1; none of them is needed.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable

import torch
import torch.nn.functional as F

Call = Callable[..., object]
PEERS: dict[tuple[str, str], tuple[str, str, Call]] = {  # (norm, provider) -> module, its function, how it is called
    ("layer", "liger"): ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction",
                         lambda f, x, w, b, eps: f.apply(x, w, b, eps)),
    ("rms", "liger"): ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction",  # its default writes dx over our dy
                       lambda f, x, w, b, eps: f.apply(x, w, eps, 0.0, "llama", False)),
    ("layer", "flash"): ("flash_attn.ops.triton.layer_norm", "layer_norm_fn",
                         lambda f, x, w, b, eps: f(x, w, b, eps=eps)),
    ("rms", "flash"): ("flash_attn.ops.triton.layer_norm", "rms_norm_fn",
                       lambda f, x, w, b, eps: f(x, w, None, eps=eps)),
    ("layer", "apex"): ("apex.normalization.fused_layer_norm", "fused_layer_norm_affine",
                        lambda f, x, w, b, eps: f(x, w, b, w.shape, eps)),
    ("rms", "apex"): ("apex.normalization.fused_layer_norm", "fused_rms_norm_affine",
                      lambda f, x, w, b, eps: f(x, w, w.shape, eps)),
    ("layer", "quack"): ("quack.rmsnorm", "layernorm_fwd",  # forward alone; it takes parameters in float32
                         lambda f, x, w, b, eps: f(x.detach(), w.detach().float(), b.detach().float(), eps)),
    ("rms", "quack"): ("quack", "rmsnorm", lambda f, x, w, b, eps: f(x, w, eps=eps)),
    ("layer", "torchnorm"): ("torchnorm._triton", "fused_layer_norm", lambda f, x, w, b, eps: f(x, w, b, eps)),
    ("rms", "torchnorm"): ("torchnorm._triton", "fused_rms_norm", lambda f, x, w, b, eps: f(x, w, eps)),
}  # fmt: skip
TORCH: dict[str, Call] = {
    "layer": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    "rms": lambda x, w, b, eps: F.rms_norm(x, w.shape, w, eps),
}
PACKAGES = {"liger": "liger-kernel", "flash": "flash-attn", "apex": "apex", "quack": "quack-kernels",
            "torchnorm": "torchnorm"}  # fmt: skip


def providers(norm: str, *, compiled: bool = True) -> dict[str, Call]:
    """PyTorch eager and compiled, and all packages that can be imported."""
    found = {"torch": TORCH[norm]}
    if compiled:
        found["compiled"] = torch.compile(TORCH[norm], dynamic=False)
    for (name, who), (module, function, call) in PEERS.items():
        try:
            it = getattr(importlib.import_module(module), function)
        except Exception:  # a package for other GPUs may fail in any way
            continue
        if name == norm:
            found[who] = functools.partial(call, it)
    return found


def versions() -> dict[str, str]:
    """Installed versions of the packages."""
    return {who: _version(package) for who, package in PACKAGES.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
