"""BLEU of trained translation models before and after folding.

    NORMKIT_DATA=FOLDER python benchmarks/folded_scores.py runs/studies/pocket/multi30k.de-en.hour/*/seed-*

Each run is folded, which a float64 comparison verifies, and its test split is translated by beam search in float32.
Rows of earlier calls are kept. Writes results/folded-multi30k.json, which `python scripts/measured.py` reads. With
--calibrate the statistics are calibrated first, and the file is results/folded-calibrated.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from normkit_papers.report import results
from normkit_papers.train.calibrate_run import calibrate_run
from normkit_papers.train.decode import beam_search
from normkit_papers.train.environment import environment
from normkit_papers.train.fold_run import fold_run
from normkit_papers.train.folder import Loaded, load
from normkit_papers.train.source import open_task

from normkit._util import write_whole

RESULTS = Path(__file__).parents[1] / "results"


def obstacle(folder: Path) -> str:
    """The reason why a folder has nothing to score; empty if it has."""
    if not (folder / "model.safetensors").is_file():
        return "no weights here"
    result = results.read(folder)
    if result["run"]["task"] != "mt" or "beam" not in result["scores"]:
        return f"no finished run on parallel text (task {result['run']['task']!r}, status {result['status']!r})"
    return ""


def translated(loaded: Loaded) -> tuple[float, list[str]]:
    """Return BLEU of the test split by beam search, and the translations."""
    task = open_task(loaded)
    task.kind = "beam"
    return task.rate(task.decode_all(beam_search(task.settings)))["bleu"], task.outputs["beam"]


def scored(folder: Path, calibrate: bool) -> dict[str, Any]:
    """Score a run's model before and after folding.

    Args:
        folder: A finished run on parallel text, with its weights.
        calibrate: Calibrate the model before both.

    Returns:
        Name and seed of the run, BLEU of both, norms that are gone, error in float64, number of equal translations.
    """
    loaded, result = load(folder), results.read(folder)
    bleu = result["scores"]["beam"]["bleu"]
    before = (folder / "outputs" / "beam.txt").read_text(encoding="utf8").split("\n")[:-1]
    if calibrate:
        loaded = calibrate_run(loaded)[0]
        bleu, before = translated(loaded)
    folded, report = fold_run(loaded)
    after, translations = translated(folded)
    same = sum(a == b for a, b in zip(before, translations, strict=True))
    return {
        "run": loaded.run.name, "seed": loaded.run.seed, "bleu": bleu, "folded": after,
        "gone": report.foldable, "max_error": report.max_error, "same": same, "n": len(before),
        "trained_at": result["where"]["commit"],
    }  # fmt: skip


def main() -> None:
    """Score the given runs, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    torch.set_num_threads(1)
    given = parser.parse_args()
    path = RESULTS / ("folded-calibrated.json" if given.calibrate else "folded-multi30k.json")
    rows = {row["run"]: row for row in json.loads(path.read_text(encoding="utf8"))} if path.exists() else {}
    for folder in given.runs:
        if why := obstacle(folder):
            print(f"{folder}: {why}, left out")
            continue
        row = scored(folder, given.calibrate)
        rows[row["run"]] = {**row, "where": environment("cpu")}
        write_whole(path, (json.dumps(list(rows.values()), indent=1) + "\n").encode())
        print({name: value for name, value in row.items() if name != "trained_at"}, flush=True)


if __name__ == "__main__":
    main()
