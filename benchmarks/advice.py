"""Fit and test the rule by which `normkit.watch.advise` predicts failure.

python benchmarks/advice.py            compute results/advice.json from the kept results and their training data
python benchmarks/advice.py --show     print the table from that file

A run fails if running statistics cost at least 0.05 of evaluation loss. They are compared with those of donors of the
same lengths; where there are none, with those of each test batch itself; on images and running text with calibrated
ones. The rule predicts failure if the norm divides by the statistics of its own batch and the share of target lengths,
given source lengths, that is between batches exceeds a threshold (`normkit.watch.length.target_share`). That share
depends on the lengths in training batches alone, so it is computed here from the batches that a recorder samples.

A checksum of each cell (data, norm, way to make batches) puts it in the half for fitting or in that for testing, with
all its seeds. The threshold is the geometric middle of two neighbouring shares of the fitting half. Within a factor of
two of it the rule predicts nothing (`normkit.watch.advise.fails`): some runs fail there and others hold.
"""

import argparse
import itertools
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path

from normkit_papers.data.batches import batches_of
from normkit_papers.report import markdown, results
from normkit_papers.tasks import TASKS
from normkit_papers.train.config import Run
from normkit_papers.train.pairs import PairTable
from normkit_papers.train.source import source

from normkit.norms import parse
from normkit.watch.advise import fails as share_fails
from normkit.watch.length import target_share
from normkit.watch.recording import Recording, Row
from normkit.watch.row_names import relies_on_batch

ROOT = Path(__file__).parents[1]
KEPT, FILE = ROOT / "results", ROOT / "results" / "advice.json"
COST = 0.05
NORMS = ("batch", "pnv", "un")
NAMES = {True: "fails", False: "holds", None: "not known"}
RIGHT = ("donors", "batch", "calibrated")  # kinds of statistics that fit the batch, best evidence first


def lengths(run: Run, table: PairTable) -> Recording:
    """Lengths of source and target in the batches that a recorder samples."""
    by = table.both if run.bucket_by == "both" else table.both[:, 0]

    def epoch(number: int) -> list:
        how = {"bucketing": run.bucketing, "by": by, "seed": run.seed, "epoch": number}
        return batches_of(table.sizes, run.batch_tokens, **how)

    batches = itertools.chain.from_iterable(map(epoch, itertools.count()))
    sampled = itertools.islice(batches, 0, run.steps, run.record_every or 25)
    return as_rows([(table.both[items].mean(0), table.both[items].std(0)) for items in sampled])


def as_rows(batches: Iterable) -> Recording:
    """A recording of two norms, that of the source and that of the target."""
    return Recording(
        Row(step, site, "layer", quantity, float(both[place]))
        for step, batch in enumerate(batches)
        for quantity, both in zip(("length", "length_spread"), batch, strict=True)
        for place, site in enumerate(("source", "target"))
    )


def measure(folder: Path, tables: dict[tuple, PairTable]) -> dict[str, object] | None:
    """Share, cost and cell of a run; None if it is not of the grid."""
    result = results.read(folder)
    run, scores = Run.from_json(json.dumps(result["run"])), result["scores"]
    norm = parse(run.model.norm)[0]
    kind = next((kind for kind in RIGHT if "loss" in scores.get(kind, {})), None)
    if norm not in NORMS or kind is None or "loss" not in scores["running"]:
        return None
    fixed = not TASKS[run.task].bucketed
    if fixed:
        recording = as_rows([((1.0, 1.0), (0.0, 0.0))] * 10)  # all sequences have one length
    else:
        if (key := (run.data, run.subwords, run.model.share)) not in tables:
            train = source(run)().train
            tables[key] = PairTable.of(train) if isinstance(train, list) else PairTable(*train)
        recording = lengths(run, tables[key])
    way = "one length" if fixed else "shuffled" if not run.bucketing else f"bucketed by {run.bucket_by}"
    return {
        "folder": folder.relative_to(KEPT).as_posix(),
        "cell": [run.data, norm, way],
        "share": round(target_share(recording), 4),
        "cost": round(scores["running"]["loss"] - scores[kind]["loss"], 4),
        "against": kind,
    }


def predicts_failure(norm: str, share: float, threshold: float) -> bool | None:
    """The rule of `advise`; None is "not known"."""
    return share_fails(share, threshold) if relies_on_batch(norm) else False


def fit(runs: list[dict]) -> float:
    """Fit the threshold, to shares of norms that rely on their batch.

    Of all thresholds with the fewest wrong predictions, the middle of the lowest range, in logarithms.
    """
    runs = [run for run in runs if relies_on_batch(run["cell"][1])]
    shares = sorted({max(run["share"], 1e-3) for run in runs})
    middles = [math.sqrt(a * b) for a, b in itertools.pairwise(shares)]
    return min(middles, key=lambda limit: (sum((run["share"] > limit) != fails(run) for run in runs), limit))


def fails(run: dict) -> bool:
    """Return True if running statistics cost the run too much."""
    return run["cost"] >= COST


def right(runs: list[dict], threshold: float) -> tuple[int, int]:
    """Number of runs that the rule predicts right, and that it predicts."""
    judged = [(predicts_failure(run["cell"][1], run["share"], threshold), fails(run)) for run in runs]
    known = [predicted == failed for predicted, failed in judged if predicted is not None]
    return sum(known), len(known)


def tally(runs: list[dict], threshold: float) -> str:
    """Format what `right` counts."""
    hits, known = right(runs, threshold)
    return f"{hits} of {known}, {len(runs) - known} not known"


def halves(runs: list[dict]) -> tuple[list[dict], list[dict]]:
    """Runs for fitting and for testing, by a checksum of their cell: further cells move none."""
    parts: tuple[list[dict], list[dict]] = ([], [])
    for run in runs:
        parts[zlib.crc32(" ".join(run["cell"]).encode()) % 2].append(run)
    return parts


def show(runs: list[dict]) -> str:
    """A row a cell, then how often the rule is right."""
    fitting, test = halves(runs)
    threshold = fit(fitting)
    cells = []
    for cell in sorted({tuple(run["cell"]) for run in runs}):
        same = [run for run in runs if tuple(run["cell"]) == cell]
        data, norm, way = cell
        predicted = {NAMES[predicts_failure(norm, run["share"], threshold)] for run in same}
        half, words = "fit" if same[0] in fitting else "test", " or ".join(sorted(predicted))
        numbers = len(same), span(same, "share"), span(same, "cost")
        cells.append([data, f"`{norm}`", way, half, *numbers, words, right(same, threshold)[0]])
    head = ["data", "norm", "batches", "half", "n", "share", "cost", "predicted", "right"]
    about = f"Threshold {threshold:.3f}, fitted. Right, of the runs that the rule predicts:"
    lines = [markdown.table(head, cells), "", about, ""]
    for name, half in (("fitting half", fitting), ("test half", test)):
        failed = list(filter(fails, half))
        lines.append(
            f"- {name}: {tally(half, threshold)} (of its {len(failed)} failures {tally(failed, threshold)});"
            f' "it holds" for all would be right on {len(half) - len(failed)}'
        )
    for data in sorted({run["cell"][0] for run in filter(fails, runs)}):
        others, left = ([run for run in runs if (run["cell"][0] == data) == same] for same in (False, True))
        lines.append(f"- {data}, fitted on all other data ({fit(others):.3f}): {tally(left, fit(others))}")
    return "\n".join(lines)


def span(runs: list[dict], key: str) -> str:
    """Smallest and largest value."""
    low, high = (f"{round(each(run[key] for run in runs), 2) + 0.0:.2f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true")
    if not parser.parse_args().show:
        tables: dict[tuple, PairTable] = {}
        found = [measure(path.parent, tables) for path in sorted(KEPT.rglob(results.FILE))]
        FILE.write_text(json.dumps([run for run in found if run], indent=1) + "\n", encoding="utf8")
    print(show(json.loads(FILE.read_text(encoding="utf8"))))
