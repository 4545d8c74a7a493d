"""Time of norms relative to `nn.LayerNorm`, and the operations that they run."""

import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from normkit.kernels.dispatch import kernels
from normkit.norms import Norm, StatNorm, make, options
from normkit_papers.op_counter import Counter
from normkit_papers.timing import ROUNDS
from normkit_papers.timing import measure as time_by_turns

LAYER = "nn.LayerNorm"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def providers(spec: str, dim: int, compiled: bool = False) -> dict[str, nn.Module]:
    """Implementations of a norm: normkit's, PyTorch's, and with `compiled` Inductor's."""
    found: dict[str, nn.Module] = {"normkit": skip_warmup(make(spec, dim))}
    if spec == "rms":
        found["torch"] = nn.RMSNorm(dim, eps=1e-5)
    if spec == "batch":
        found["torch"] = nn.BatchNorm1d(dim)
    if compiled:
        found["compiled"] = torch.compile(skip_warmup(make(spec, dim)))  # type: ignore[assignment]
    return found


def skip_warmup(norm: Norm) -> Norm:
    """Put a norm into its state after any warm-up.

    >>> int(skip_warmup(make("un", 8)).step) > 4000
    True
    """
    if isinstance(norm, StatNorm):
        norm.step.fill_(2**31)
        if (end := getattr(norm, "warmup_end", None)) is not None:
            end.fill_(1)
            norm._ended.seen = 1  # a GPU's copy would take some steps
    return norm


def training(norm: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Return a function that runs one forward and backward, without accumulating gradients."""
    x = x.clone().requires_grad_()
    inputs = [x, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(x), inputs, dy)


def inference(norm: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a function that runs one forward in evaluation mode."""
    norm.eval()

    def run() -> Tensor:
        with torch.no_grad():
            return norm(x)

    return run


def measure(
    specs: Sequence[str], rows: int, dim: int, dtype: str = "float32", rounds: int = ROUNDS, device: str = "cpu",
    compiled: bool = False, threads: int = 1,
) -> list[dict]:  # fmt: skip
    """Time norms on activations `[rows, dim]` beside `nn.LayerNorm`.

    Args:
        specs: Norms.
        rows: Number of tokens.
        dim: Number of channels.
        dtype: Type of the activations, a key of `DTYPES`.
        rounds: Rounds of turns.
        device: "cpu" or "cuda".
        compiled: Also time each norm compiled by Inductor.
        threads: Threads of PyTorch.

    Returns:
        A row for each norm and implementation, of forward and backward ("train") and, with frozen statistics, of
        "inference". `ratio` is to `nn.LayerNorm` in the same round, the median over rounds; `low` and `high` are the
        20th and 80th percentile. `ceiling` is the time of copying the bytes that the norm has to move, over its time
        (5 activations in training, 8 if the statistics of the batch come first, 2 at inference). `noise` is the ratio
        of `nn.LayerNorm` to itself.

    Example:
        >>> [row["norm"] for row in measure(["rms"], 8, 4, rounds=1)]
        ['nn.LayerNorm', 'rms', 'rms']
    """
    kind = DTYPES[dtype]
    torch.manual_seed(0)
    x, dy = torch.randn(2, rows, dim, device=device).to(kind)
    place, table = torch.empty_like(x), []
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    for mode in ("train", "inference"):
        layer = nn.LayerNorm(dim, device=device, dtype=kind)
        runs: dict[str, Callable] = {
            f"torch {LAYER}": training(layer, x, dy) if mode == "train" else inference(layer, x),
            "copy": lambda: place.copy_(x),
        }
        for spec in specs:
            for provider, built in providers(spec, dim, compiled).items():
                norm = built.to(device, kind)
                if mode == "train":
                    runs[f"{provider} {spec}"] = training(norm, x, dy)
                elif getattr(norm, "offline", False):
                    runs[f"{provider} {spec}"] = inference(norm, x)
        if mode == "inference" and len(runs) == 2:
            continue
        timings = time_by_turns(runs, rounds, threads=threads, device=device)
        for run in timings.seconds:
            if run == "copy":
                continue
            provider, spec = run.split(" ", 1)
            found, seconds = timings.ratio(run, f"torch {LAYER}"), timings.median(run)
            table.append({
                "device": name, "threads": threads, "torch": torch.__version__, "provider": provider,
                "norm": spec, "pass": mode, "shape": f"{rows}x{dim}", "dtype": dtype, "rounds": rounds,
                "ms": round(1e3 * seconds, 3), "low": round(found.low, 2), "ratio": round(found.median, 2),
                "high": round(found.high, 2),
                "ceiling": round(moves(spec, mode) / 2 * timings.median("copy") / seconds, 2),
                "noise": round(timings.noise, 3),
            })  # fmt: skip
    return table


def moves(spec: str, mode: str = "train") -> int:
    """Number of activations that a norm has to read and write.

    >>> moves("rms"), moves("batch"), moves("power")
    (5, 8, 5)
    """
    if mode == "inference":
        return 2
    norm = None if spec == LAYER else make(spec, 8)
    return 8 if isinstance(norm, StatNorm) and type(norm).known_in_advance is StatNorm.known_in_advance else 5


def explain(spec: str, rows: int, dim: int, dtype: str = "float32", device: str = "cpu") -> list[dict]:
    """List the operations of a forward and a backward, and the memory that they touch.

    A norm with a warm-up has a row for it and one for the time after. `touched` is in activations, read from a cache or
    not; vectors count by their size.

    >>> [(row["phase"], row["ran"]) for row in explain("layer", 8, 4)]
    [('any', 'fused layer')]
    """
    kind, table = DTYPES[dtype], []
    for phase in ("warming up", "after") if options(spec.partition("(")[0]).get("warmup") else ("any",):
        norm = make(spec, dim).to(device, kind).train()
        norm = skip_warmup(norm) if phase == "after" else norm
        x = torch.randn(rows, dim, device=device).to(kind).requires_grad_()
        dy, inputs = torch.randn_like(x), [x, *norm.parameters()]
        torch.autograd.grad(norm(x), inputs, dy, allow_unused=True)
        with kernels("auto") as ran:
            with Counter() as forward:
                y = norm(x)
            with Counter() as backward:
                torch.autograd.grad(y, inputs, dy, allow_unused=True)
        table.append({
            "norm": spec, "phase": phase, "ran": ", ".join(sorted(ran)),
            "forward": forward.operations, "forward_touched": round(forward.bytes / x.nbytes, 1),
            "backward": backward.operations, "backward_touched": round(backward.bytes / x.nbytes, 1),
        })  # fmt: skip
    return table
