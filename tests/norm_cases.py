"""Specs with short warm-ups, random norms, and a training step, for all laws."""

import resource
import signal
import sys
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normkit.kernels.dispatch import kernels
from normkit.norms import NORMS, Norm, StatNorm, make, options

DIM = 8
SHORT = {
    "warmup": 2,
    "window": 2,
    "renorm_after": 2,
    "r_until": 4,
    "d_until": 4,
    "until": 4,
    "groups": 2,
}
VARIANTS = [
    "power(groups=0, warmup=2)",
    "power(groups=0, warmup=2, form='released')",
    "un(window=2, warmup=2, outlier_filtration=True)",
    "un(window=2, warmup=2, form='released', window_bkw=3)",
    "group(groups=2, over='sample')",
    "rms",
    "rms(eps_at='outside', bias=True)",
]


def short(name: str) -> str:
    """Return a spec with warm-ups and windows so short that six steps pass through them."""
    known = options(name)
    given = ", ".join(f"{key}={value}" for key, value in SHORT.items() if key in known)
    return f"{name}({given})" if given else name


SPECS = [short(name) for name in NORMS] + VARIANTS
STAT_SPECS = [spec for spec in SPECS if isinstance(make(spec, DIM), StatNorm)]


def reads_its_sample(spec: str) -> bool:
    """Check if an output depends on other positions of its sample, at inference too."""
    return getattr(make(spec, DIM), "over", "token") == "sample"


def random_norm(spec: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Norm:
    """Return a norm with random parameters: an identity affine hides bugs."""
    generator = torch.Generator().manual_seed(seed)
    norm = make(spec, DIM).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter.mean() + 0.5 + noise)
    return norm


def batch(seed: int, *shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Return random rows whose channels differ in size and mean."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    spread = torch.linspace(0.5, 2.0, shape[-1], dtype=torch.float64)
    return ((x + 0.3) * spread * scale).to(dtype)


def train_step(norm: Norm, x: Tensor, dy: Tensor, mask: Tensor | None = None, call: Any = None) -> dict[str, Tensor]:
    """Run one forward and backward; return output, gradients and state by name."""
    norm.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = (norm if call is None else call)(x, mask)
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad}
    out.update({f"d{name}": p.grad.clone() for name, p in norm.named_parameters() if p.grad is not None})
    out.update({name: buffer.clone() for name, buffer in norm.named_buffers()})
    return out


def trained(spec: str, steps: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> Norm:
    """Return a norm after some training steps, past a short warm-up."""
    norm = random_norm(spec, seed, dtype)
    for i in range(steps):
        train_step(norm, batch(i, 6, DIM, dtype=dtype, scale=1 + 0.1 * i), batch(50 + i, 6, DIM, dtype=dtype))
    return norm


# settings with a rule for kernels (`kernel_rule`), and without
WITH_KERNEL_RULE = [
    "batch", "batch(running_var='biased', affine=False)", "pnv(bias=False)", "repbn", "un(window=2, warmup=2)",
    "un(window=2, warmup=2, outlier_filtration=True)", "un(outlier_filtration=True)",
    "un(window=2, warmup=2, outlier_filtration=True, window_bkw=3)",
    "un(window=3, window_bkw=2, alpha_bkw=0.5)", "un(window=1, eps=0.0)",
    "power(groups=0, warmup=2)", "power(groups=2, warmup=2, clamp=True)",
    "un", "power(groups=0)",
]  # fmt: skip
WITHOUT_KERNEL_RULE = [
    "power(groups=0, warmup=2, form='released')",
    "un(window=2, warmup=2, outlier_filtration=True, threshold='channel')",
    "renorm(warmup=1, r_until=3, d_until=3)", "mabn(window=2, warmup=2, renorm_after=3)", "mabn(window=2)",
]  # fmt: skip
PER_TOKEN = [spec for spec in SPECS if spec not in STAT_SPECS]


def several_steps(norm, draw, masked, choice):
    """Return all results of six steps, with a NaN batch, one of padding, and a NaN dy."""
    seen = []
    for turn in range(6):
        x, dy = draw(3, 4, norm.dim), draw(3, 4, norm.dim)
        x, dy = x * (float("nan") if turn == 2 else 1 + turn / 4), dy * (float("nan") if turn == 3 else 1)
        keep = torch.rand(3, 4, device=x.device) > (2 if turn == 4 else 0.3)
        norm.zero_grad()
        with kernels(choice):
            y = norm(x.requires_grad_(), keep if masked else None)
            y.backward(dy)
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in norm.parameters() if p.grad is not None)]
        seen += [b.clone() for b in norm.buffers()]
    return seen


def equal_steps(spec, masked, choice, draw, prepare=lambda norm: None):
    """Compare six steps by other kernels with those of the reference."""
    found = []
    for each in (choice, "reference"):
        torch.manual_seed(0)
        norm = make(spec, 40).to(draw(1).device)  # two programs in Triton, one of which has channels to spare
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        prepare(norm)
        found.append(several_steps(norm, draw, masked, each))
    torch.testing.assert_close(*found, atol=3e-5, rtol=3e-5, equal_nan=True)


def two_forwards_a_step(spec, choice, recomputed, draw):
    """Return gradients and state of three steps with two forwards in one graph, recomputed or not."""
    torch.manual_seed(0)
    norm, seen = make(spec, 24).to(draw(1).device), []
    with kernels(choice):
        for _ in range(3):
            one, two = (draw(5, 24).requires_grad_() for _ in range(2))
            parts = [checkpoint(norm, x, use_reentrant=False) if recomputed else norm(x) for x in (one, two)]
            (parts[0] + 2 * parts[1]).backward(draw(5, 24))
            seen += [one.grad, two.grad]
    return [*seen, *(p.grad for p in norm.parameters()), *norm.buffers()]


@contextmanager
def full_disk(size=3000):
    """A limit on the size of files within the block, as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a module that is first imported in the block must not leave a bytecode file cut short for all later processes
    no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        sys.dont_write_bytecode = no_bytecode
