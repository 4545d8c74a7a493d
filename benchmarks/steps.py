"""Time of training steps of small translation models on random words, relative to LayerNorm.

    python benchmarks/steps.py [--norms SPEC ...] [--rounds 60] [--out FILE]
    python benchmarks/steps.py --compile --out benchmarks/results/steps_compiled_cpu.csv

A step is forward, backward, clipping and optimizer. The model of a CPU has 0.4 million parameters and 12 norms, so that
time in Python counts: the worst case. Variants take turns on one pinned thread. Norms are past their warm-up; "SPEC in
its warm-up" stays in the automatic one. "SPEC + scale loss" adds the scale loss, which compiled models do not take.
`gpu.py` times steps of larger models.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from normkit_papers.models.config import Model
from normkit_papers.models.mt import Seq2Seq
from rows import commit, keep, processor

import normkit
from normkit.bench import measure, skip_warmup
from normkit.models import scale_loss

NORMS = (
    "layer", "rms", "scale", "power(groups=0)", "power(groups=1)", "pnv", "batch", "mabn", "un",
    "un(outlier_filtration=True)",
)  # fmt: skip
EARLY, SCALED = " in its warm-up", " + scale loss"
COLUMNS = ("device", "commit", "torch", "compiled", "norm", "rounds", "ms", "low", "ratio", "high", "noise")
SIZES = {  # model, words, sequences and words in each
    "dry": ({"width": 16, "hidden": 32, "depth": 1, "heads": 2}, 100, (2, 5)),
    "g2p": ({"width": 96, "hidden": 192, "depth": 2, "heads": 4}, 60, (64, 8)),
    "iwslt14": ({"width": 512, "hidden": 1024, "depth": 6, "heads": 4}, 10_000, (128, 32)),
    "multi30k": ({"width": 192, "hidden": 768, "depth": 3, "heads": 4}, 10_000, (64, 16)),
}


def training_step(
    size: str, spec: str, device: str = "cpu", *, bf16: bool = False, compiled: bool = False
) -> Callable[[], None]:
    """Return a function that trains a model on a batch of random words."""
    torch.manual_seed(0)
    sizes, words, batch = SIZES[size]
    source, target = torch.randint(4, words, (2, *batch), device=device)
    model = Seq2Seq(Model(norm=spec.removesuffix(SCALED).removesuffix(EARLY), share=True, **sizes), words, words)
    model.to(device).train()
    for norm in [module for module in model.modules() if isinstance(module, normkit.Norm)]:
        if EARLY in spec:
            norm.lag.fill_(math.nan)  # never below the limit: the warm-up lasts
        else:
            skip_warmup(norm)
    hooks = ExitStack()
    scales = hooks.enter_context(scale_loss(model)) if SCALED in spec else lambda: 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=size != "dry")
    if compiled:
        model.compile(dynamic=True)

    def step(_: ExitStack = hooks) -> None:  # whose end would remove the hooks
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(source, target).flatten(0, -2).float(), target.flatten())
        (loss + 0.1 * scales()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the models by torch.compile")
    parser.add_argument("--norms", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "steps_cpu.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one function for many norms
    norms = args.norms or (*NORMS, "un" + EARLY, *([] if args.compile else ["un" + SCALED]))
    calls = {spec: training_step("g2p", spec, compiled=args.compile) for spec in dict.fromkeys(["layer", *norms])}
    for call in calls.values():
        call()
    timings = measure(calls, args.rounds)
    for spec in calls:
        found = timings.ratio(spec, "layer")
        row = {
            "device": processor(), "commit": commit(), "torch": torch.__version__, "compiled": args.compile,
            "norm": spec, "rounds": args.rounds, "ms": round(1e3 * timings.median(spec), 2), "low": round(found.low, 3),
            "ratio": round(found.median, 3), "high": round(found.high, 3), "noise": round(timings.noise, 3),
        }  # fmt: skip
        print("  ".join(f"{row[column]!s:>16s}" for column in COLUMNS[4:]), flush=True)
        keep(args.out, COLUMNS, ("device", "compiled", "norm"), [row])


if __name__ == "__main__":
    main()
