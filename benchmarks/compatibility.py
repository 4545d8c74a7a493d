"""Fold many models and write docs/compatibility.md.

The page lists the norms found, converted and gone, the errors, and what stays and why.

    python benchmarks/compatibility.py [--rows benchmarks/results/compatibility.json] [--out docs/compatibility.md]
    python benchmarks/compatibility.py --only bert gpt2 "timm resnet18"
    python benchmarks/compatibility.py --page

All models are tiny and random, with random gains, biases and statistics: identities would hide errors. Each finished
case is written to `--rows`; cases that are there already run again only with `--only`. `--page` writes the page alone.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import architectures
import diffusers_models
from compatibility_page import page
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.models.vit import TinyViT
from third_party_models import CASES, Case, missing, padding, pixels, randomize, tokens

from normkit.fold import fold, to_rms
from normkit.models import convert, find

ROOT = Path(__file__).parents[1]
OFFLINE = ("un", "batch", "renorm", "mabn", "pnv", "repbn", "power(groups=0)")
ONLINE = ("as it is", "power(groups=2)")


def _config(placement: str = "pre") -> Model:
    torch.manual_seed(0)
    return Model(width=16, hidden=32, depth=2, heads=2, placement=placement)


def _translation(placement: str) -> Case:
    source = tokens(2, 7, high=20) * padding()
    return Case(randomize(Seq2Seq(_config(placement), 20, 22)).eval(), (source, tokens(2, 6, high=22)), {})


OWN = {
    "own_mt_pre": lambda: _translation("pre"),
    "own_mt_post": lambda: _translation("post"),
    "own_lm": lambda: Case(randomize(DecoderLM(_config(), 22)).eval(), (tokens(2, 7, high=22),), {}),
    "own_vit": lambda: Case(randomize(TinyViT(_config(), 8, 4, 1, 5)).eval(), (pixels(3, 1, 8, 8),), {}),
}
ZOO = {**CASES, **OWN}
FURTHER = {**architectures.CASES, **diffusers_models.CASES}


def folded(case: Case, spec: str, untie: bool = False) -> dict[str, object]:
    """Convert a model to one norm, fold it, and count."""
    model = case.model
    if spec != ONLINE[0]:
        model = randomize(convert(model, spec, mask_from=case.mask_from)).eval()
    start = time.process_time()
    _, report = fold(model, *case.args, outputs=case.outputs, untie=untie, **case.kwargs)
    counted = Counter(row.action for row in report)
    left = Counter(reason(row.why) for row in report if row.action in ("multiply-add", "add", "kept"))
    return {
        "norms": len(report), "gone": int(report.foldable.split()[0]), "gain": counted["gain folded"],
        "affine": counted["multiply-add"] + counted["add"], "kept": counted["kept"], "error": report.max_error,
        "saved": report.saved, "why": dict(left.most_common()), "seconds": round(time.process_time() - start, 1),
    }  # fmt: skip


def to_rmsnorm(case: Case) -> dict[str, object]:
    """Replace LayerNorms by RMSNorms, and count."""
    _, report = to_rms(case.model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)
    left = Counter(reason(row.why) for row in report if row.why)
    return {"norms": len(report), "rms": report.count("rms"), "error": report.max_error, "why": dict(left)}


def zoo(name: str) -> dict[str, object]:
    """One model with every norm that is offline at inference, and with norms that are not."""
    case = ZOO[name]()
    row: dict[str, object] = {spec: folded(case, spec) for spec in (*OFFLINE, *ONLINE)}
    row["untied"] = folded(case, ONLINE[0], untie=True)
    if any(each.kind.startswith("layer") for each in find(case.model).values()):
        row["rms"] = to_rmsnorm(case)
    return row


def further(name: str) -> dict[str, object]:
    """One further architecture, converted to `un`."""
    row: dict[str, object] = {}
    try:
        case = FURTHER[name]()
        row["found"] = len(find(case.model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row |= folded(case, "un")
        row["warnings"] = sorted({str(w.message)[:200] for w in caught if "leaves norms" in str(w.message)})
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return row


REASONS = {  # part of a reason: how the page puts it
    "tied to an embedding": "tied output",
    "a sum in": "feeds a residual sum",
    "output of the model": "its output is the model's",
    "model output": "its output is the model's",
    "zero padding": "zero padding, a mask or a factor before its reader",
    "another norm": "feeds another norm",
    "read by norm": "feeds another norm",
    "also read by": "something else reads the stream",
    "model input": "its input is the model's",
    "another order": "a norm over several positions reads it",
    "no layer's output": "something computed is added",
    "only a part": "written by groups",
    "layers alone": "its input is computed",
}


def reason(why: str) -> str:
    """A reason without the names of a particular layer."""
    first, _, rest = why.partition(";")
    if first.startswith("no call that was tried used"):
        return f"weights that no call used may read it ({rest.partition(';')[0].strip()})"
    if first.startswith("read by aten"):
        return first.replace("aten.", "")
    return next((text for part, text in REASONS.items() if part in first), first)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "compatibility.md")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "results" / "compatibility.json")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if unknown := [name for name in given.only if name not in (*ZOO, *FURTHER)]:
        parser.error(f"no model is called {unknown[0]!r}; names are those of the page, such as bert or 'timm resnet18'")
    if given.page and not given.rows.exists():
        parser.error(f"there is no {given.rows}; leave out --page to measure the rows first")
    rows = json.loads(given.rows.read_text()) if given.rows.exists() else {"zoo": {}, "further": {}}
    for kind, cases, run in (("zoo", ZOO, zoo), ("further", FURTHER, further)):
        for name in cases:
            if given.page or (name not in given.only if given.only else name in rows[kind]):
                continue
            if kind == "zoo" and missing(name):
                print(f"{name}: {missing(name)} is not installed", flush=True)
                continue
            rows[kind][name] = row = run(name)
            print(name, {key: row[key] for key in ("gone", "norms", "why", "failed") if key in row}, flush=True)
            rows["versions"] = _versions()
            given.rows.write_text(json.dumps(rows, indent=1, sort_keys=True))
    given.out.write_text(page(rows), encoding="utf8")


def _versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    packages = ("normkit", "torch", "transformers", "timm", "torchvision", "diffusers")
    return {"commit": commit.stdout.strip(), **{package: version(package) for package in packages}}


if __name__ == "__main__":
    main()
