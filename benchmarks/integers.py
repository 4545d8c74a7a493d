"""Accuracy in 8-bit integers of trained models with LayerNorm, UN, and UN folded.

    python benchmarks/integers.py minilm --weights FOLDER     FOLDER/layer, FOLDER/un: see deploy_models.py
    python benchmarks/integers.py g2p --weights FOLDER        FOLDER/g2p-layer, FOLDER/g2p-un: `normkit train` folders
    python benchmarks/integers.py --show                      the table of docs/deploying.md alone

Each variant is quantized by onnxruntime: scope "products" or "stream" (residual additions, too), weights with one
scale or with one for each channel. MiniLM is scored by the mean cosine of 64 sentence embeddings to the model's own in
float; our models by the share of right symbols, given the right ones before them, and with --decode N by errors of
greedy search on N test items. Finished rows are kept: an interrupted run goes on. Writes
benchmarks/results/integers-MODEL.json.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from deploy import quantize
from normkit_papers.data.vocab import PAD
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.report import markdown
from normkit_papers.train.decode import greedy
from normkit_papers.train.environment import environment
from normkit_papers.train.pairs import spread
from normkit_papers.train.source import open_task
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import Int8, export

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDS: dict[str, dict[str, Any]] = {  # options of fold
    "folded": {},
    "folded, balance": {"balance": True},
    "folded, spread=16, balance": {"spread": 16, "balance": True},
    "folded, spread=4, balance": {"spread": 4, "balance": True},
    "folded, spread=2, balance": {"spread": 2, "balance": True},
}
SCOPES = {"products": "products", "stream": "residual stream too"}


@dataclasses.dataclass
class Study:
    """A model with LayerNorm and with UN, its calibration batches, and its score.

    Attributes:
        models: By "layer" and "un".
        batches: Keyword arguments; the first is the example.
        score: `score(forward, norm)` of a function of keyword arguments, with the model that it should equal.
        outputs: Picks what is used of the output.
    """

    models: dict[str, nn.Module]
    batches: list[dict[str, Tensor]]
    score: Callable[[Callable[..., Tensor], str], dict[str, float]]
    outputs: Callable[[Any], Any] | None = None


def minilm(weights: Path, decode: int) -> Study:
    """MiniLM; 48 tokens of running text from this repository's documentation, without padding."""
    import deploy_models
    import minilm as real
    from transformers import AutoTokenizer

    subject = deploy_models.make("minilm", weights)
    un, _ = subject.variant("un")
    tokenizer = AutoTokenizer.from_pretrained(weights / "layer")
    texts = real.passages(160)

    def batch(start: int) -> dict[str, Tensor]:
        given = {"padding": "max_length", "truncation": True, "max_length": 48, "return_tensors": "pt"}
        return dict(tokenizer(texts[start : start + 8], **given))

    test = [batch(start) for start in range(0, 64, 8)]
    models = {"layer": subject.model, "un": un}
    own = {norm: real.embeddings(model, test) for norm, model in models.items()}

    def score(forward: Callable[..., Tensor], norm: str) -> dict[str, float]:
        rows = []
        for each in test:
            mask = each["attention_mask"][..., None]
            rows.append((forward(**each) * mask).sum(1) / mask.sum(1))
        found = torch.cat(rows)
        return {"cosine": real.cosine(found, own[norm]), "to_original": real.cosine(found, own["layer"]), "n": 64}

    return Study(models, [batch(start) for start in range(64, len(texts) - 7, 8)], score, deploy_models.used)


class Decoding:
    """A quantized forward in place of a model, for greedy search without a cache."""

    def __init__(self, forward: Callable[..., Tensor], length: int):
        self.forward, self.length = forward, length

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Sources, padded to the exported length."""
        return F.pad(source, (0, self.length - source.shape[1]), value=PAD), source != PAD

    def decode(self, last: Tensor, memory: Tensor, real: Tensor, cache: dict, start: int) -> Tensor:
        """Scores of what follows `last`; the cache holds the prefix."""
        prefix = torch.cat([cache["prefix"][0], last], 1) if start else last
        cache["prefix"] = (prefix, prefix)
        target = F.pad(prefix, (0, self.length - prefix.shape[1]), value=PAD)
        return self.forward(source=memory, target=target)[:, start : start + 1]


def ours(name: str, weights: Path, decode: int) -> Study:
    """A sequence-to-sequence model, on test items of at most 32 or 48 symbols."""
    from normkit_papers.train.folder import load

    loaded = {norm: load(weights / f"{name}-{norm}") for norm in ("layer", "un")}
    run = dataclasses.replace(loaded["layer"].run, test_items=2000)
    task = open_task(loaded["layer"]._replace(run=run))
    length = 32 if run.task == "g2p" else 48
    fits = [item for item in range(len(task._test)) if max(task._test.both[item]) <= length]
    kept = task._test.take(fits)
    valid = task._valid.take([item for item in range(len(task._valid)) if max(task._valid.both[item]) <= length])

    def padded(table: Any, items: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        source, given, target = (
            F.pad(t, (0, length - t.shape[1]), value=PAD).long() for t in table.batch(items).tensors
        )
        return {"source": source, "target": given}, target

    test = [padded(kept, items) for items in kept.sorted_items(100)]
    few = [fits[at] for at in spread(len(fits), decode or 1)]
    short, task._test_items = task._test.take(few), [task._test_items[item] for item in few]
    if "reference" in task.outputs:
        task.outputs["reference"] = [task.outputs["reference"][item] for item in few]

    def score(forward: Callable[..., Tensor], norm: str) -> dict[str, float]:
        right = total = 0
        for given, target in test:
            real = target != PAD
            right += int(((forward(**given).argmax(-1) == target) & real).sum())
            total += int(real.sum())
        found = {"symbols": 100 * right / total, "n": total}
        if decode:
            standing = Decoding(forward, length)

            def search(_: Any, source: Tensor, limit: int | Tensor) -> Any:
                return greedy(standing, source, torch.as_tensor(limit).clamp(max=length))

            found |= task.rate(task.decode_all(search, short))
        return found

    models = {norm: each.model.eval() for norm, each in loaded.items()}
    return Study(models, [padded(valid, list(range(at, at + 32)))[0] for at in range(0, 256, 32)], score)


STUDIES: dict[str, tuple[str, Callable[[Path, int], Study]]] = {
    "minilm": ("MiniLM, post-norm: cosine to the same model in float, to the original", minilm),
    "g2p": ("spelling to sound, pre-norm: symbols right, %", lambda *given: ours("g2p", *given)),
    "g2p-post": ("spelling to sound, post-norm: symbols right, %", lambda *given: ours("g2p-post", *given)),
    "multi30k": ("translation, pre-norm: symbols right, %", lambda *given: ours("multi30k", *given)),
}


def session(path: Path) -> Callable[..., Tensor]:
    """A forward of keyword arguments that runs a file on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [slot.name for slot in made.get_inputs()]
    return lambda **given: torch.from_numpy(made.run(None, {name: given[name].numpy() for name in names})[0])


def measure(name: str, study: Study, path: Path, folds: list[str], more: str) -> None:
    """Score every variant that the result file does not have.

    `more` are further flags of the command.
    """
    result = json.loads(path.read_text(encoding="utf8")) if path.exists() else {"rows": []}
    result |= {"command": f"python benchmarks/integers.py {name} --weights FOLDER{more}", "where": environment()}
    done = {(row["norms"], row["scope"], row["per_channel"]) for row in result["rows"]}

    def add(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
        print(row, flush=True)

    for norms in ("layer", "un", *folds):
        todo = [each for each in KINDS if (norms, *each) not in done]
        if not todo:
            continue
        norm = "layer" if norms == "layer" else "un"
        model, about = study.models[norm], {"left": "all", "spread": None}
        if norms in FOLDS:
            options = dict(FOLDS[norms])
            if options.pop("balance", False):
                options["balance"] = study.batches[:4]
            example = {key: tensor[:2] for key, tensor in study.batches[0].items()}
            model, report = fold(model, outputs=study.outputs, other_shapes=False, **options, **example)
            gone, _, total = report.foldable.partition(" of ")
            about = {"left": int(total) - int(gone), "spread": report.spread}
        with tempfile.TemporaryDirectory() as folder:
            in_float, in_integers = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
            export(model, in_float, outputs=study.outputs, tolerance=1e-3, **study.batches[0])
            for scope, per_channel in todo:
                if scope != "float32":
                    quantize(in_float, in_integers, Int8(study.batches, scope, per_channel))
                forward = session(in_float if scope == "float32" else in_integers)
                add({"norms": norms, "scope": scope, "per_channel": per_channel, **about, **study.score(forward, norm)})


KINDS = [("float32", True), *((scope, per_channel) for scope in SCOPES for per_channel in (True, False))]


def table(folder: Path = RESULTS) -> str:
    """The table of docs/deploying.md."""
    parts = []
    for name, (title, _) in STUDIES.items():
        path = folder / f"integers-{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf8"))
        rows = {(row["norms"], row["scope"], row["per_channel"]): row for row in result["rows"]}
        head = ["norms", "multiply-adds left", "spread", "float32"]
        head += [f"{text}, per {'channel' if per else 'tensor'}" for text in SCOPES.values() for per in (True, False)]
        lines = []
        for norms in dict.fromkeys(row["norms"] for row in result["rows"]):
            first = rows[norms, "float32", True]
            wide = f"{first['spread']:,.{0 if first['spread'] >= 100 else 1}f}" if first["spread"] else ""
            left = "" if first["left"] == "all" else str(first["left"])
            cells = [_cell(rows.get((norms, *kind))) for kind in KINDS]
            names = {"layer": "LayerNorm", "un": "UN, not folded"}
            lines.append([names.get(norms, f"UN {norms}"), left, wide, *cells])
        where = result["where"]
        decoded = " decoded, for symbols all test items up to the exported length" if "symbols" in first else ""
        parts += [
            f"**{title}**",
            "",
            markdown.table(head, lines),
            "",
            f"n = {first['n']:,}{decoded}; one {where['device']}, commit {where['commit'][:7]}; `{result['command']}`",
            "",
        ]
    return "\n".join(parts).rstrip()


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "cosine" in row:
        return f"{row['cosine']:.3f}, {row['to_original']:.3f}"
    more = "".join(f", {name.upper()} {row[name]:.1f}" for name in ("per", "bleu") if name in row)
    return f"{row['symbols']:.2f}{more}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(STUDIES))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--folds", nargs="*", default=list(FOLDS), choices=FOLDS)
    parser.add_argument("--decode", type=int, default=0, help="test items to decode by greedy search")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    load_torchvision()
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in given.models:
        if given.weights is None:
            parser.error("--weights FOLDER is missing: the trained models")
        more = f" --decode {given.decode}" if given.decode else ""
        more += "" if given.folds == list(FOLDS) else " --folds " + " ".join(map(repr, given.folds))
        study = STUDIES[name][1](given.weights, given.decode)
        measure(name, study, given.out / f"integers-{name}.json", given.folds, more)
    if given.show:
        page = ROOT / "docs" / "deploying.md"
        made = {"integers": table(given.out)}
        page.write_text(markdown.fill(page.read_text(encoding="utf8"), made.get), encoding="utf8")


if __name__ == "__main__":
    main()
