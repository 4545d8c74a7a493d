"""Remove all norms of a language model by `normkit remove-norms`, and keep a row of CSV.

    python benchmarks/remove_norms_lm.py SMOLLM2 OUT wiki.train.txt --second wiki.valid.txt --steps 96

SMOLLM2 is a folder with a checkpoint and its tokenizer, OUT a new folder for the model without norms. The loss is of a
held-out part of the first text. Each block is trained alone for `--steps` steps, then the whole model for as many.
With `--own 128` in place of a text the model trains on 128 texts that it samples itself, kept in `OUT.txt`.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import rows
import torch
from tqdm import tqdm

from normkit.models import load_pretrained
from normkit.removal.folders import Settings, remove_norms_dir

FIELDS = ("way", "norms_gone", "norms", "bound", "tokens_fitted", "steps", "seconds", "loss", "delta",
          "evaluated_tokens", "command", "commit", "device", "note")  # fmt: skip
RESULTS = Path("papers/results/remove-norms-lm.csv")
TOGETHER = 64  # texts that are written at a time


@torch.no_grad()
def write_own(path: Path, out: Path, number: int, length: int) -> None:
    """Let a model write texts by sampling at temperature 1, and keep their lines in a file."""
    model = load_pretrained(path).float().eval()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    first = torch.tensor([[tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0]])
    lines: list[str] = []
    for start in tqdm(range(0, number, TOGETHER), desc="writing", disable=None):
        begin = first.repeat(min(TOGETHER, number - start), 1)
        tokens = model.generate(
            input_ids=begin, attention_mask=torch.ones_like(begin), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=int(first),
        )  # fmt: skip
        for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
            lines += [line for line in text.splitlines() if line.strip()]
    out.write_text("\n".join(lines) + "\n", encoding="utf8")


def main(arguments: list[str] | None = None) -> None:
    """Remove the norms, and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", nargs="?", help="to train on")
    parser.add_argument("--own", type=int, metavar="N", help="train on N texts of --length tokens by the model itself")
    parser.add_argument("--second", help="another text, which is measured on alone")
    parser.add_argument("--steps", type=int, default=8, help="of each block, and of the whole")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted training")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if (given.text is None) == (given.own is None):
        parser.error("give a text or --own")
    text = given.text or str(given.out.with_suffix(".txt"))
    if given.own and not given.resume and Path(text).exists():
        parser.error(f"{text} exists; name another OUT, or --resume")
    if given.own and not Path(text).exists():
        write_own(given.model, Path(text), given.own, given.length)
    settings, start = Settings(text, given.second, steps=given.steps, length=given.length), time.time()
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
