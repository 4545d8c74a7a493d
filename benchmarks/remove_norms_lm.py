"""Remove all norms of a language model by `normkit remove-norms`, and keep a row of CSV.

    python benchmarks/remove_norms_lm.py SMOLLM2 OUT wiki.train.txt --second wiki.valid.txt --steps 96

SMOLLM2 is a folder with a checkpoint and its tokenizer, OUT a new folder for the model without norms. The loss is of a
held-out part of the first text. Each block is trained alone for `--steps` steps, then the whole model for as many.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import rows

from normkit.removal.folders import Settings, remove_norms_dir

FIELDS = ("way", "norms_gone", "norms", "bound", "tokens_fitted", "steps", "seconds", "loss", "delta",
          "evaluated_tokens", "command", "commit", "device", "note")  # fmt: skip
RESULTS = Path("papers/results/remove-norms-lm.csv")


def main(arguments: list[str] | None = None) -> None:
    """Remove the norms, and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", help="to train on")
    parser.add_argument("--second", help="another text, which is measured on alone")
    parser.add_argument("--steps", type=int, default=8, help="of each block, and of the whole")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted training")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    settings, start = Settings(given.text, given.second, steps=given.steps, length=given.length), time.time()
    found = remove_norms_dir(given.model, given.out, settings, resume=given.resume)
    print(found)
    removal = found.removal
    row = {
        "way": "normkit remove-norms", "norms_gone": int(removal.fold.foldable.split()[0]), "norms": "all",
        "bound": True, "steps": given.steps, "seconds": round(time.time() - start),
        "loss": f"{removal.scores['without norms']:.4f}", "delta": f"{removal.rise:.4f}",
        "command": shlex.join(["python", "benchmarks/remove_norms_lm.py", *(arguments or sys.argv[1:])]),
        "commit": rows.commit(), "device": rows.processor(),
        "note": f"error of the fold in float64 {removal.fold.max_error:.1e}",
    }  # fmt: skip
    rows.keep(given.results, FIELDS, ("way", "norms_gone", "norms", "bound", "steps", "command"), [row])


if __name__ == "__main__":
    main()
