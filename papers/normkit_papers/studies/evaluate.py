"""After training: fold the models of the demo, and compare their inference speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.bench import ROUNDS, Timings, measure
from normkit_papers.report import results
from normkit_papers.studies.workers import send
from normkit_papers.train.fold_run import audit_run, fold_run
from normkit_papers.train.folder import Loaded, load, save
from normkit_papers.train.progress import Progress
from normkit_papers.train.source import open_task

WORDS = 64  # words that are decoded together for timing
FOLDED = "folded"  # sub-folder of a run


def finish_job(
    title: str, folders: dict[str, Path], to_fold: str | None, baseline: str | None, rounds: int = ROUNDS
) -> None:
    """Add folding and inference speed to the results of runs, in a worker.

    All models are timed in one process, in turns.

    Args:
        title: Title of the job on the progress board.
        folders: Folders of the runs, by title.
        to_fold: Run to fold, score again, and time against itself and `baseline`.
        baseline: Run to compare with.
        rounds: Rounds of timing.
    """

    def show(stage: str) -> None:
        send(title, Progress(stage, 0, 1))

    loaded = {name: load(folder) for name, folder in folders.items()}
    found = {name: results.read(folder) for name, folder in folders.items()}
    show("checking what folds")
    for name, run in loaded.items():
        audit = audit_run(run)
        rows = [{key: getattr(one, key) for key in ("name", "norm", "action", "into", "why")} for one in audit]
        found[name]["fold"] = {"foldable": audit.foldable, "max_error": None, "rows": rows}
    folded_name = f"{to_fold} {FOLDED}"
    if to_fold is not None:
        show(f"folding {to_fold}")
        loaded[folded_name], report = fold_run(loaded[to_fold])
        save(folders[to_fold] / FOLDED, loaded[folded_name])
        found[to_fold]["fold"] |= {"max_error": report.max_error, "native_error": report.native_error}
        found[to_fold]["scores"]["folded"] = open_task(loaded[folded_name]).score_test()
    show("timing")
    timings = _timings(loaded, rounds)
    for name, result in found.items():
        result["speed"]["inference_words_per_s"] = WORDS / timings.median(name)
    if to_fold is not None:
        pairs = [(folded_name, to_fold)]
        if baseline is not None:
            pairs += [(folded_name, baseline), (to_fold, baseline)]
        found[to_fold]["timing"] = {
            "what": f"seconds to decode {WORDS} words step by step, along the right answers",
            "pairs": [{"a": a, "b": b, **_ratio(timings, a, b)} for a, b in pairs],
            "noise": timings.noise,
            "obstacle": timings.obstacle or None,
        }
    for name, result in found.items():
        results.write(folders[name], result)


def _timings(models: Mapping[str, Loaded], rounds: int) -> Timings:
    from normkit_papers.data.embedded import cmudict
    from normkit_papers.train.pairs import PairTable, spread

    pairs = cmudict().test
    source, given, _ = PairTable.of(pairs).batch(spread(len(pairs), WORDS)).tensors
    decoding = {name: lambda m=run.model: decode_along(m, source, given) for name, run in models.items()}
    return measure(decoding, rounds)


def _ratio(timings: Timings, a: str, b: str) -> dict[str, float]:
    found = timings.ratio(a, b)
    return {"ratio": found.median, "low": found.low, "high": found.high, "n": found.rounds}


@torch.no_grad()
def decode_along(model: Any, source: Tensor, target: Tensor) -> None:
    """Decode step by step with a cache, along `target`, so that all models do the same work.

    Args:
        model: A Seq2Seq.
        source: Symbols, `[batch, time]`.
        target: Symbols that the decoder is given, `[batch, time]`.
    """
    memory, real = model.encode(source)
    cache: dict = {}
    for step in range(target.shape[1]):
        model.decode(target[:, step : step + 1], memory, real, cache, step).argmax(-1)
