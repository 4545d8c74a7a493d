"""The table model x norm: found, converted, folded, kept and why, largest error. Writes docs/compatibility.md.

    python benchmarks/compatibility.py [--out docs/compatibility.md]

Tiny configurations in random initialisation, with random gains, biases and statistics: an identity would hide bugs.
A model of a library that is not installed is left out, and the page says so.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from third_party_models import CASES, Case, missing, padding, pixels, randomize, tokens

from normkit.lab.models.config import Model
from normkit.lab.models.lm import DecoderLM
from normkit.lab.models.mt import Seq2Seq
from normkit.lab.models.vit import TinyViT
from normkit.transforms import convert, find, fold, to_rms

SPECS = ("as it is", "un", "batch", "power(groups=0)", "power(groups=2)")
TITLES = {
    "bert": "BERT (transformers)", "roberta": "RoBERTa (transformers)", "gpt2": "GPT-2 (transformers)",
    "t5": "T5 (transformers)", "bart": "BART (transformers)", "marian": "Marian (transformers)",
    "llama": "Llama (transformers)", "mistral": "Mistral (transformers)", "qwen": "Qwen 3 (transformers)",
    "gemma": "Gemma (transformers)", "gemma2": "Gemma 2 (transformers)", "hf_vit": "ViT (transformers)",
    "hf_swin": "Swin (transformers)", "hf_resnet": "ResNet (transformers)", "timm_vit": "ViT (timm)",
    "timm_deit": "DeiT (timm)", "timm_swin": "Swin (timm)", "timm_convnext": "ConvNeXt (timm)",
    "torchvision_vit": "ViT (torchvision)", "torchvision_swin": "Swin (torchvision)",
    "torch_encoder_post": "nn.TransformerEncoder, post-norm", "torch_encoder_pre": "nn.TransformerEncoder, pre-norm",
    "own_mt_pre": "normkit translation, pre-norm", "own_mt_post": "normkit translation, post-norm",
    "own_lm": "normkit language model", "own_vit": "normkit ViT",
}  # fmt: skip


def _config(placement: str = "pre") -> Model:
    torch.manual_seed(0)
    return Model(width=16, hidden=32, depth=2, heads=2, placement=placement)


def _mt(placement: str) -> Case:
    source = tokens(2, 7, high=20) * padding()
    return Case(randomize(Seq2Seq(_config(placement), 20, 22)).eval(), (source, tokens(2, 6, high=22)), {})


OWN = {
    "own_mt_pre": lambda: _mt("pre"),
    "own_mt_post": lambda: _mt("post"),
    "own_lm": lambda: Case(randomize(DecoderLM(_config(), 22)).eval(), (tokens(2, 7, high=22),), {}),
    "own_vit": lambda: Case(randomize(TinyViT(_config(), 8, 4, 1, 5)).eval(), (pixels(3, 1, 8, 8),), {}),
}


def row(name: str, case: Case, spec: str, untie: bool) -> dict[str, object]:
    """What folding makes of a model with the norms of one spec."""
    model = case.model
    if spec != SPECS[0]:
        model = randomize(convert(model, spec, mask_from=case.mask_from)).eval()
    _, report = fold(model, *case.args, outputs=case.outputs, untie=untie, **case.kwargs)
    counted = Counter(each.action for each in report)
    return {
        "model": name, "norm": spec, "untie": untie, "found": len(find(case.model)),
        "converted": 0 if spec == SPECS[0] else len(report),
        "folded": counted["folded"] + counted["folded back"], "gain": counted["gain folded"], "add": counted["add"],
        "affine": counted["multiply-add"], "kept": counted["kept"], "saved": report.saved, "error": report.max_error,
        "why": sorted({reason(each.why) for each in report if each.action in ("multiply-add", "add", "kept")}),
    }  # fmt: skip


def reason(why: str) -> str:
    """A reason without the names of a particular layer."""
    first = why.partition(";")[0]
    if "tied to an embedding" in first:
        return "tied output"
    if "a sum in" in first:
        return "feeds a residual"
    if "caller" in first:
        return "its output is the model's"
    if "zero padding" in first:
        return "zero padding before its reader"
    if "another norm" in first or first.startswith("read by norm"):
        return "feeds a residual"
    if first.startswith("read by aten"):
        return f"read by {first.removeprefix('read by ')}"
    return first


HEAD = """# Models and norms

Made by `python benchmarks/compatibility.py`; do not edit. Tiny configurations in random initialisation, with random
gains, biases and statistics. Every norm of a model is converted to the norm in the second column, then the model is
folded and compared with itself in float64, on an example and on random inputs of other shapes; `error` is the largest
difference, relative to the largest output.

`folded`: gone, into the layers that read it or write its input. `gain`: gain and bias are gone, of a norm that computes
statistics at inference. `mul-add`, `add`: one multiply-add, or one addition, is left. `kept`: as it was. `untied`: how
many are folded, or have lost their gain, with `untie=True`, where that makes a difference. `saved` counts parameters;
it is below zero where layers without bias had to get one.

| model | norm | found | converted | folded | gain | untied | mul-add | add | kept | saved | error | left, why |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def page(rows: list[dict], rms: list[tuple[str, str, float]], left_out: dict[str, str]) -> str:
    """The page as Markdown."""
    lines = [HEAD]
    apart = {(r["model"], r["norm"]): r for r in rows if r["untie"]}
    for r in (r for r in rows if not r["untie"]):
        u = apart[r["model"], r["norm"]]
        gone = "gain" if r["gain"] or u["gain"] else "folded"
        untied = f"{u[gone]}" if u[gone] != r[gone] else ""
        worst, why = max(r["error"], u["error"]), "; ".join(r["why"])
        lines.append(
            f"| {TITLES[r['model']]} | {r['norm']} | {r['found']} | {r['converted']} | {r['folded']} | {r['gain']} | "
            f"{untied} | {r['affine']} | {r['add']} | {r['kept']} | {r['saved']:,} | {worst:.0e} | {why} |"
        )
    lines += ["", "## LayerNorm to RMSNorm, exactly", "",
              "`to_rms(model, *example, untie=True)`: the centring moves into the writers of the residual stream.", "",
              "| model | RMSNorm now | error | the others, why |", "|---|---|---|---|"]  # fmt: skip
    lines += [f"| {TITLES[name]} | {count} | {error:.0e} | {why} |" for name, count, error, why in rms]
    if left_out:
        names = ", ".join(f"{TITLES[name]} ({library} is not installed)" for name, library in left_out.items())
        lines += ["", f"Left out here: {names}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "compatibility.md")
    parser.add_argument("--models", nargs="+", default=[*CASES, *OWN])
    given = parser.parse_args()
    rows, rms, left_out = [], [], {}
    for name in given.models:
        if name in CASES and (library := missing(name)):
            left_out[name] = library
            continue
        case = {**CASES, **OWN}[name]()
        for spec in SPECS:
            for untie in (False, True):
                rows.append(row(name, case, spec, untie))
        if any(each.kind.startswith("layer") for each in find(case.model).values()):
            _, report = to_rms(case.model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)
            why = sorted({_reason_rms(each.why) for each in report if each.why})
            rms.append((name, f"{report.count('rms')} of {len(report)}", report.max_error, "; ".join(why)))
        print(name, flush=True)
    given.out.write_text(page(rows, rms, left_out), encoding="utf8")


RMS_REASONS = {
    "also read by": "something else reads the stream",
    "caller writes": "the caller writes the stream",
    "output of norm": "post-norm",
    "another order": "a norm over several positions at once reads it",
    "no layer's output": "something computed is added",
    "only a part": "written by groups",
    "layers alone": "its input is computed",
    "several places": "a shared embedding",
}


def _reason_rms(why: str) -> str:
    return next((said for part, said in RMS_REASONS.items() if part in why), why)


if __name__ == "__main__":
    main()
