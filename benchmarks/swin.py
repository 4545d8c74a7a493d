"""Swin-T at inference, LayerNorm against UN folded away.

Unified Normalization's Table 8, in one run.

    python benchmarks/swin.py                                      512 pictures of 224 on a GPU, 4 on a CPU
    python benchmarks/swin.py --models swin_t mask_rcnn --precisions fp32 tf32 amp --batch 512 --rounds 20
    python benchmarks/swin.py --show benchmarks/results/swin-DEVICE.json       the section of docs/vision.md alone
    python benchmarks/swin.py --dry --out FOLDER                   the script itself, on tiny models

Models are torchvision's and timm's as they build them, with `nn.LayerNorm`, and converted from that: `rms`, `un`, and
`folded`, which is `un` with its norms folded into the products behind them. Weights are random, gains and biases of
norms too: a bias of zero would fold where a trained one leaves an addition. Statistics are those of noise. Variants
take turns, round by round; a ratio is taken within a round, its median is reported with the 20th and 80th percentile.
The first baseline is the honest one: LayerNorm compiled by `torch.compile`. Memory is what PyTorch had allocated at
most during a call on a GPU, the model's weights and the pictures included (CPU: benchmarks/deploy.py).
"""

import argparse
import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from normkit_papers.models.config import Model
from normkit_papers.models.detection import detector
from torchvision_stub import load_torchvision, torchvision_operators
from normkit_papers.report import markdown
from normkit_papers.train.environment import environment
from torch import Tensor, nn

from normkit._util import align
from normkit.bench import measure
from normkit.fold import fold
from normkit.models import calibrate, convert, find

ROOT = Path(__file__).parents[1]
NORMS = ("layer", "rms", "un", "folded")
RUNTIMES = ("compiled", "eager")
PRECISIONS = ("fp32", "tf32", "amp")
PAPER = {  # images a second and MB on an RTX 3090: LN, UN folded
    "swin_t": ((1179.5, 1547.8), (9978, 8213)),
    "mask_rcnn": ((17.8, 22.1), (955, 897)),
}


class Subject(NamedTuple):
    """A model with `nn.LayerNorm`, the name of its part that has norms.

    Also the number and size of the images that it takes.
    """

    model: nn.Module
    part: str
    batch: int
    size: tuple[int, int]


def swin_t(batch: int, dry: bool) -> Subject:
    """torchvision's."""
    load_torchvision()
    from torchvision.models import swin_transformer

    if dry:
        model = swin_transformer.SwinTransformer([4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=7)
        return Subject(model, "", batch, (32, 32))
    return Subject(swin_transformer.swin_t(weights=None), "", batch, (224, 224))


def timm_swin_t(batch: int, dry: bool) -> Subject:
    """timm's."""
    load_torchvision()
    import timm

    small = {"img_size": 56, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "num_classes": 7} if dry else {}
    model = timm.create_model("swin_tiny_patch4_window7_224", **small)
    return Subject(model, "", batch, (56, 56) if dry else (224, 224))


def mask_rcnn(batch: int, dry: bool) -> Subject:
    """Mask R-CNN on two pictures, whatever the batch of the others is.

    Random weights would give each variant another number of boxes, so all keep as many as there may be: overlaps drop
    none, and one class takes any score.
    """
    model = detector(Model(arch="mask_rcnn_pocket" if dry else "mask_rcnn_swin_t"), classes=1)
    model.rpn.nms_thresh = model.roi_heads.nms_thresh = 1.0
    model.roi_heads.score_thresh = 0.0
    for name in find(model.backbone):  # the detector comes with norms of ours
        ours = model.backbone.get_submodule(name)
        plain = nn.LayerNorm(ours.weight.numel(), eps=ours.eps)
        plain.load_state_dict(ours.state_dict())
        model.backbone.set_submodule(name, plain)
    return Subject(model, "backbone", 2, (64, 96) if dry else (800, 1333))


MODELS: dict[str, Callable[[int, bool], Subject]] = {
    "swin_t": swin_t,
    "timm_swin_t": timm_swin_t,
    "mask_rcnn": mask_rcnn,
}


def variants(subject: Subject) -> tuple[dict[str, nn.Module], str]:
    """The model by NORMS, on the CPU, and what was folded.

    Statistics are those of pictures like those to come.
    """
    model, part = subject.model.eval(), subject.part
    for norm in [module for module in model.modules() if isinstance(module, nn.LayerNorm)]:
        nn.init.uniform_(norm.weight, 0.8, 1.2)
        nn.init.uniform_(norm.bias, -0.1, 0.1)
    noise = torch.rand(2, 3, *subject.size)
    un = calibrate(convert(model, "un").eval(), [noise], forward=lambda m, x: m(list(x)) if part else m(x))
    folded, report = fold(un.get_submodule(part), noise[:1, :, :64, :64] if part else noise[:1], other_shapes=False)
    outcomes = ", ".join(f"{report.count(action)} {action}" for action in sorted({row.action for row in report.rows}))
    note = f"norms {outcomes}; largest error {report.max_error:.0e}"
    if part:
        note += f"; nms and roi_align: {torchvision_operators()}"
        whole = copy.deepcopy(un)
        whole.set_submodule(part, folded)
        folded = whole
    return {"layer": model, "rms": convert(model, "rms").eval(), "un": un, "folded": folded}, note


def call_of(model: nn.Module, images: Tensor, precision: str, part: str) -> Callable[[], Any]:
    """One inference, of no arguments."""
    given = list(images) if part else images

    def call() -> Any:
        kind = images.device.type
        amp = torch.autocast(kind, torch.bfloat16) if precision == "amp" else contextlib.nullcontext()
        with torch.no_grad(), amp:
            return model(given)

    return call


def compare(name: str, subject: Subject, precision: str, runtimes: list[str], layout: str, rounds: int, device: str):
    """Rows of one model at one precision; all variants take turns."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    form = torch.channels_last if layout == "last" else torch.contiguous_format
    images = torch.rand(subject.batch, 3, *subject.size).to(device, memory_format=form)
    models, note = variants(subject)
    runtimes = ["eager"] if subject.part else runtimes  # boxes of a detector are not compiled
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    boxes: set[tuple[int, ...]] = set()
    for norm, model in models.items():
        model.to(device, memory_format=form)
        for runtime in runtimes:
            made = torch.compile(model) if runtime == "compiled" else model
            calls[norm, runtime] = call_of(made, images, precision, subject.part)
            found = calls[norm, runtime]()
            if subject.part:
                boxes.add(tuple(len(picture["boxes"]) for picture in found))
    if len(boxes) > 1:
        raise ValueError(f"variants of {name} found different numbers of boxes, {boxes}: their times do not compare")
    names = {" ".join(key): key for key in calls}
    timings = measure(
        {text: calls[key] for text, key in names.items()}, rounds, threads=torch.get_num_threads(), device=device
    )
    for text, (norm, runtime) in names.items():
        own = sum(t.nbytes for t in [*models[norm].parameters(), *models[norm].buffers(), images])
        row = {
            "model": name,
            "precision": precision,
            "runtime": runtime,
            "norm": norm,
            "layout": layout,
            "batch": subject.batch,
            "size": " x ".join(map(str, subject.size)),
            "rounds": rounds,
            "images_per_s": subject.batch / timings.median(text),
            "peak_mb": peak(calls[norm, runtime], own) if device == "cuda" else None,
            "note": note if norm == "folded" else "",
        }
        for label, base in (("compiled", "layer compiled"), ("likewise", f"layer {runtime}")):
            found = timings.ratio(base, text) if base in names else None  # images per second, relative to LayerNorm
            for key, name_of in (("low", "low"), ("ratio", "median"), ("high", "high")):
                row[f"{label}_{key}"] = getattr(found, name_of) if found else None
        yield row
    torch._dynamo.reset()


def peak(call: Callable[[], object], own: int) -> float:
    """MB allocated at most during a call.

    The bytes that the variant and its input hold are included.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + own) / 2**20


HEAD = ("model", "precision", "runtime", "norm", "images/s", "to LayerNorm compiled", "to LayerNorm likewise", "MB")


def cells(row: dict) -> list[str]:
    """A row as text, in the order of HEAD."""
    spans = [
        f"{row[f'{label}_ratio']:.3f} ({row[f'{label}_low']:.3f} to {row[f'{label}_high']:.3f})"
        if row[f"{label}_ratio"]
        else "-"
        for label in ("compiled", "likewise")
    ]
    held = f"{row['peak_mb']:.0f}" if row["peak_mb"] else "-"
    names = [str(row[key]) for key in ("model", "precision", "runtime", "norm")]
    return [*names, f"{row['images_per_s']:.1f}", *spans, held]


def claims(rows: list[dict]) -> list[str]:
    """Folded UN against LayerNorm as the paper counts, beside what it prints.

    The compiled pair first.
    """
    lines = []
    for new in sorted((row for row in rows if row["norm"] == "folded"), key=lambda row: RUNTIMES.index(row["runtime"])):
        same = ("model", "precision", "runtime", "layout")
        old = next(row for row in rows if row["norm"] == "layer" and all(row[key] == new[key] for key in same))
        gains = f"{100 * (new['likewise_ratio'] - 1):+.1f}% images a second"
        if new["peak_mb"]:
            gains += f", {100 * (new['peak_mb'] / old['peak_mb'] - 1):+.1f}% memory"
        line = f"{new['model']}, {new['runtime']}, {new['precision']}: {gains}"
        if new["model"] in PAPER and new["runtime"] == "eager":
            (slow, fast), (much, less) = PAPER[new["model"]]
            line += f" (the paper, RTX 3090: {100 * (fast / slow - 1):+.1f}% and {100 * (less / much - 1):+.1f}%)"
        lines.append(line)
    return lines


def table(rows: list[dict]) -> str:
    """All rows as text."""
    return "\n".join([align([HEAD, *map(cells, rows)]), "", *claims(rows)])


def section(result: dict) -> str:
    """The part of docs/vision.md that a result file makes."""
    at, rows = result["where"], result["rows"]
    first = rows[0]
    head = (
        f"{at['device']}, batch {first['batch']}, images of {first['size']}, {first['rounds']} rounds; normkit "
        f"`{(at['commit'] or 'unknown')[:9]}`{' with local changes' if at['dirty'] else ''}, torch {at['torch']}."
    )
    notes = [*dict.fromkeys(f"{r['model']}: {r['note']}" for r in rows if r["note"]), *claims(rows)]
    return "\n".join([head, "", markdown.table(HEAD, map(cells, rows)), "", *(f"- {line}" for line in notes)])


def put(page: Path, result: dict) -> None:
    """Write the section into the page, between its marks."""
    made = {"table-8": section(result)}
    page.write_text(markdown.fill(page.read_text(encoding="utf8"), made.get), encoding="utf8")


def write(result: dict, out: Path) -> Path:
    """Write swin-DEVICE.json into a folder, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"swin-{re.sub(r'[^a-z0-9]+', '-', result['where']['device'].lower()).strip('-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    return path


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["swin_t", "mask_rcnn"] if cuda else ["swin_t"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "amp"])
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--layout", choices=("last", "first"), default="last", help="channels of pictures and kernels")
    parser.add_argument("--batch", type=int, default=512 if cuda else 4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, help="a page to put the section into, as docs/vision.md")
    parser.add_argument("--show", type=Path, help="a result file to make the section of, without measuring")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU")
    given = parser.parse_args(arguments)
    page = given.page or (ROOT / "docs" / "vision.md" if given.show else None)
    if given.show:
        put(page, json.loads(given.show.read_text(encoding="utf8")))
        return
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    device = "cuda" if cuda and not given.dry else "cpu"
    result = {"what": __doc__.splitlines()[0], "where": environment(), "layout": given.layout, "rows": []}
    for name in given.models:
        for precision in given.precisions:
            subject = MODELS[name](2 if given.dry else given.batch, given.dry)
            rounds = 2 if given.dry else given.rounds
            result["rows"] += compare(name, subject, precision, given.runtimes, given.layout, rounds, device)
            path = write(result, given.out)
            print(f"{name}, {precision}: in {path}", flush=True)
    print(table(result["rows"]))
    if page:
        put(page, result)


if __name__ == "__main__":
    main()
