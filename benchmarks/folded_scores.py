"""BLEU of trained translation models before and after folding.

    NORMKIT_DATA=FOLDER python benchmarks/folded_scores.py runs/studies/pocket/multi30k.de-en.hour/*/seed-*

Each run is folded, which a float64 comparison verifies, and its test split is translated by beam search in float32.
Rows of earlier calls are kept. Writes results/folded-multi30k.json, which `python scripts/measured.py` reads.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from normkit.files import write_whole
from normkit.lab.report import results
from normkit.lab.tasks import TASKS
from normkit.lab.train.environment import environment
from normkit.lab.train.fold_run import fold_run
from normkit.lab.train.folder import load

RESULT = Path(__file__).parents[1] / "results" / "folded-multi30k.json"


def obstacle(folder: Path) -> str:
    """The reason why a folder has nothing to score; empty if it has."""
    if not (folder / "model.safetensors").is_file():
        return "no weights here"
    result = results.read(folder)
    if result["run"]["task"] != "mt" or "beam" not in result["scores"]:
        return f"no finished run on parallel text (task {result['run']['task']!r}, status {result['status']!r})"
    return ""


def scored(folder: Path) -> dict[str, Any]:
    """Score a run's model before and after folding.

    Args:
        folder: A finished run on parallel text, with its weights.

    Returns:
        Name and seed of the run, BLEU of both, norms that are gone, error in float64, number of equal translations.
    """
    loaded, result = load(folder), results.read(folder)
    folded, report = fold_run(loaded)
    run, spec = loaded.run, TASKS[loaded.run.task]
    task = spec.load("module")(run, folded.model.eval(), spec.load("data")(run, lambda stage: None)())
    task.kind = "folded"
    bleu = task.rate(task.decode_all(task.beam))["bleu"]
    before = (folder / "outputs" / "beam.txt").read_text(encoding="utf8").split("\n")[:-1]
    same = sum(a == b for a, b in zip(before, task.outputs["folded"], strict=True))
    return {
        "run": run.name, "seed": run.seed, "bleu": result["scores"]["beam"]["bleu"], "folded": bleu,
        "gone": report.foldable, "max_error": report.max_error, "same": same, "n": len(before),
        "trained_at": result["where"]["commit"],
    }  # fmt: skip


def main() -> None:
    """Score the given runs, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    torch.set_num_threads(1)
    rows = {row["run"]: row for row in json.loads(RESULT.read_text(encoding="utf8"))} if RESULT.exists() else {}
    for folder in parser.parse_args().runs:
        if why := obstacle(folder):
            print(f"{folder}: {why}, left out")
            continue
        row = scored(folder)
        rows[row["run"]] = {**row, "where": environment("cpu")}
        write_whole(RESULT, (json.dumps(list(rows.values()), indent=1) + "\n").encode())
        print({name: value for name, value in row.items() if name != "trained_at"}, flush=True)


if __name__ == "__main__":
    main()
