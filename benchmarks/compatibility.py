"""Convert and fold many models: norms found, converted and gone, errors, and what stays and why.

    python benchmarks/compatibility.py [--out benchmarks/results/compatibility.csv]
    python benchmarks/compatibility.py --only bert gpt2 "timm resnet18"

All models are tiny and random, with random gains, biases and statistics: identities would hide errors. Each finished
model is written at once; models that are in the file already run again only with `--only`.
"""

import argparse
import contextlib
import csv
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import architectures
from normkit_papers.models.classifiers import TinyViT
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.mt import Seq2Seq
from rows import commit, keep
from third_party_models import CASES, Case, missing, padding, pixels, randomize, tokens
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from normkit.fold import fold, to_rms
from normkit.fold.report import Outcome
from normkit.models import convert, find

OFFLINE = ("un", "batch", "renorm", "mabn", "pnv", "repbn", "power(groups=0)")
ONLINE = ("as it is", "power(groups=2)")
COLUMNS = (
    "model", "spec", "norms", "gone", "gain", "affine", "kept", "rms", "found", "error", "saved", "why", "failed",
    "warnings", "seconds", "experts", "forwards", "commit",
)  # fmt: skip


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


@contextlib.contextmanager
def counted_forwards(kind: type[nn.Module]) -> Iterator[list[nn.Module]]:
    """Note every forward of a model of this class, whatever copy of it runs."""
    found: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _: found.append(module) if type(module) is kind else None)
    try:
        yield found
    finally:
        handle.remove()


def folded(case: Case, spec: str, untie: bool = False, keep: bool = False) -> dict[str, object]:
    """Convert a model to one norm, fold it, and count."""
    model = case.model
    if spec != ONLINE[0]:
        model = randomize(convert(model, spec, mask_from=case.mask_from)).eval()
    start = time.process_time()
    with counted_forwards(type(model)) as forwards:
        _, report = fold(model, *case.args, outputs=case.outputs, untie=untie, keep_architecture=keep, **case.kwargs)
    counted = Counter(row.action for row in report)
    left = Counter(reason(row) for row in report if row.action in ("multiply-add", "add", "kept"))
    left["bias without a place"] += sum("its bias stays" in row.why for row in report if row.action == "gain folded")
    config = getattr(model, "config", None)
    return {
        "norms": len(report), "gone": int(report.foldable.split()[0]), "gain": counted["gain folded"],
        "affine": counted["multiply-add"] + counted["add"], "kept": counted["kept"], "error": f"{report.max_error:.1e}",
        "saved": report.saved, "why": counts(left), "seconds": round(time.process_time() - start, 1),
        "forwards": len(forwards),
        "experts": next((getattr(config, name) for name in architectures.EXPERTS if hasattr(config, name)), ""),
    }  # fmt: skip


def to_rmsnorm(case: Case) -> dict[str, object]:
    """Replace LayerNorms by RMSNorms, and count."""
    _, report = to_rms(case.model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)
    left = Counter(reason(row) for row in report if row.why)
    return {"norms": len(report), "rms": report.count("rms"), "error": f"{report.max_error:.1e}", "why": counts(left)}


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
        case = architectures.CASES[name]()
        row["found"] = len(find(case.model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row |= folded(case, "un")
        row["warnings"] = "; ".join(sorted({str(w.message)[:200] for w in caught if "leaves norms" in str(w.message)}))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return row


def counts(found: Counter) -> str:
    """Reasons with their numbers, the most frequent first."""
    return "; ".join(f"{name}: {count}" for name, count in found.most_common() if count)


REASONS = {  # part of a reason: how the page puts it
    "tied to an embedding": "tied output",
    "has no bias to take the shift": "tied output",  # without the tie, the bias alone would stay
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


def reason(row: Outcome) -> str:
    """A reason without the names of a particular layer."""
    first, _, rest = row.why.partition(";")
    if first == "read by aten.bmm":
        return "norm of queries or keys"
    if first.startswith("no call that was tried used"):
        return f"weights that no call used may read it ({rest.partition(';')[0].strip()})"
    if first.startswith("read by aten"):
        return first.replace("aten.", "")
    return next((text for part, text in REASONS.items() if part in first), first)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compatibility.csv")
    parser.add_argument("--only", nargs="+", default=[], help="names of models, such as bert or 'timm resnet18'")
    given = parser.parse_args()
    if unknown := [name for name in given.only if name not in (*ZOO, *architectures.CASES)]:
        parser.error(f"no model is called {unknown[0]!r}; give a name such as bert or 'timm resnet18'")
    lines = given.out.read_text(encoding="utf8").splitlines() if given.out.exists() else []
    done = {row["model"] for row in csv.DictReader(lines)}
    for name in given.only or [name for name in (*ZOO, *architectures.CASES) if name not in done]:
        if name in ZOO and missing(name):
            print(f"{name}: {missing(name)} is not installed", flush=True)
            continue
        rows = zoo(name) if name in ZOO else {"un": further(name)}
        if name in architectures.GAINS:
            rows["gains"] = folded(architectures.CASES[name](), ONLINE[0], keep=True)
        made = [{"model": name, "spec": spec, "commit": commit(), **row} for spec, row in rows.items()]
        print(name, *(f"{spec}: {row.get('gone', row.get('failed'))}" for spec, row in rows.items()), flush=True)
        keep(given.out, COLUMNS, ("model", "spec"), made)


if __name__ == "__main__":
    main()
