"""Time of `fold` in forwards of the model, on one thread.

    python benchmarks/fold.py [--models bert6 vit swin bert gpt2 resnet18] [--rounds 3]

Forward and fold take turns; the median over rounds is written to benchmarks/results/fold.csv.
"""

import argparse
import csv
import io
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from deploy import MODELS, used

import normkit as nk
from normkit._util import write_whole
from normkit.bench import use_threads

OUT = Path(__file__).parent / "results" / "fold.csv"


def resnet18() -> Any:
    """ResNet-18 of timm with random weights."""
    import timm

    return timm.create_model("resnet18").eval(), lambda batch: {"x": torch.randn(batch, 3, 224, 224)}, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "resnet18", "swin", "bert", "gpt2"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from torchvision_stub import load_torchvision

    load_torchvision()
    rows = []
    for name in given.models:
        torch.manual_seed(0)
        model, inputs, _ = resnet18() if name == "resnet18" else MODELS[name](None)
        model, example = nk.convert(model, "un").eval(), inputs(2)
        for module in model.modules():
            if isinstance(module, nk.Norm):
                module.running.uniform_(0.5, 1.5)
        forwards, folds = [], []
        with use_threads(1):
            for _ in range(given.rounds):
                start = time.process_time()
                with torch.no_grad():
                    model(**example)
                forwards.append(time.process_time() - start)
                start = time.process_time()
                _, report = nk.fold(model, outputs=used, **example)
                folds.append(time.process_time() - start)
        forward, fold = statistics.median(forwards), statistics.median(folds)
        row = {"model": name, "gone": report.foldable, "forward_ms": round(1e3 * forward, 1), "fold_s": round(fold, 2)}
        rows.append({**row, "forwards": round(fold / forward, 1), "rounds": given.rounds})
        print(rows[-1], flush=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(OUT, text.getvalue().encode())


if __name__ == "__main__":
    main()
