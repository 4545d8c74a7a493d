"""Open what `normkit fold` wrote by transformers alone, and compare it with the original.

    PYTHONPATH=/tmp/transformers-4.57 python benchmarks/loaders.py /tmp/zoo --make
    python benchmarks/loaders.py /tmp/zoo --fold
    PYTHONPATH=/tmp/transformers-4.57 python benchmarks/loaders.py /tmp/zoo

The first command writes the tiny models of tests/test_checkpoints.py to /tmp/zoo/NAME/model; a real one can be put
beside them. The second folds each to /tmp/zoo/NAME/folded, and tied ones to /tmp/zoo/NAME/untied, too. The third writes
a row for each result to benchmarks/results/loaders.csv: keys that are missing or unexpected, the largest difference of
a logit relative to the largest logit, and whether 16 greedy tokens are the same.
"""

import argparse
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import rows
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from torchvision_stub import load_torchvision

load_torchvision()
import transformers  # noqa: E402 (after what it looks for)

RESULTS = Path(__file__).parent / "results" / "loaders.csv"
COLUMNS = (
    "model", "result", "transformers", "dtype", "missing", "unexpected", "difference", "same_text", "torch", "commit",
)  # fmt: skip


def make(root: Path) -> None:
    """Write tiny models with random gains and biases."""
    from test_checkpoints import CASES, model_of

    for name in CASES:
        model_of(name).save_pretrained(root / name / "model", max_shard_size="8KB")


def fold(root: Path) -> None:
    """Fold each model, with its output layer tied and not."""
    from normkit.fold.folders import fold_dir

    for folder in sorted(root.iterdir()):
        tied = transformers.AutoConfig.from_pretrained(folder / "model").tie_word_embeddings
        for name in ("folded", "untied") if tied else ("folded",):
            shutil.rmtree(folder / name, ignore_errors=True)
            fold_dir(folder / "model", folder / name, untie=name == "untied")


def opened(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in a folder, and what its loader says."""
    kind = transformers.AutoModelForCausalLM
    model, said = kind.from_pretrained(folder, output_loading_info=True, **{DTYPE: "auto"})
    return model.eval(), said


DTYPE = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"


@torch.no_grad()
def compare(folder: Path, result: str) -> dict[str, Any]:
    """Open original and result, and compare logits and text."""
    (original, _), (folded, said) = opened(folder / "model"), opened(folder / result)
    ids = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    if (folder / "model" / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    expected, found = (model(input_ids=ids, use_cache=False).logits for model in (original, folded))
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "use_cache": False}
    texts = [model.generate(ids, attention_mask=torch.ones_like(ids), **settings) for model in (original, folded)]
    return {
        "dtype": str(folded.dtype).removeprefix("torch."), "missing": len(said["missing_keys"]),
        "unexpected": len(said["unexpected_keys"]) + len(said["mismatched_keys"]),
        "difference": f"{float((found - expected).abs().max() / expected.abs().max()):.1e}",
        "same_text": torch.equal(*texts),
    }  # fmt: skip


def main() -> None:
    """Make, fold or compare."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="write the tiny models")
    parser.add_argument("--fold", action="store_true", help="fold all models of the folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.make:
        make(given.folder)
    elif given.fold:
        fold(given.folder)
    else:
        about = {"transformers": transformers.__version__, "torch": torch.__version__, "commit": rows.commit()}
        for folder in sorted(path for path in given.folder.glob("*/*") if path.name != "model"):
            row = {"model": folder.parent.name, "result": folder.name, **compare(folder.parent, folder.name), **about}
            print(row, flush=True)
            rows.keep(given.out, COLUMNS, ("model", "result", "transformers"), [row])


if __name__ == "__main__":
    main()
