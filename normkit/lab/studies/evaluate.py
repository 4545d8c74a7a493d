"""After the training: what folding makes of each model, and how fast they are beside each other."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.lab.report import results
from normkit.lab.studies.workers import tell
from normkit.lab.train.fold_run import audit_run, fold_run
from normkit.lab.train.progress import Progress
from normkit.lab.train.run import Loaded, load, save

WORDS = 256  # words that are decoded together for timing
REPEATS = 15
FOLDED = "folded"  # sub-folder of a run


def finish_job(title: str, folders: dict[str, Path], to_fold: str | None, baseline: str | None) -> None:
    """A worker's job: complete the results of the runs in `folders`.

    Each gets what folding can make of it and its speed of inference; `to_fold` is folded, scored again and timed beside
    itself and `baseline`. All are timed in one process, in turns.
    """

    def say(stage: str) -> None:
        tell(title, Progress(stage, 0, 1))

    loaded = {name: load(folder) for name, folder in folders.items()}
    found = {name: results.read(folder) for name, folder in folders.items()}
    say("asking what folds")
    for name, run in loaded.items():
        fates = audit_run(run)
        found[name]["fold"] = {"foldable": fates.foldable, "max_error": None, "rows": [_row(fate) for fate in fates]}
    if to_fold is not None:
        say(f"folding {to_fold}")
        folded, report = fold_run(loaded[to_fold])
        save(folders[to_fold] / FOLDED, folded)
        loaded[f"{to_fold} {FOLDED}"] = folded
        found[to_fold]["fold"] |= {"max_error": report.max_error, "native_error": report.native_error}
        found[to_fold]["scores"]["folded"] = _scores(folded)
    say("timing")
    times = _times(loaded)
    for name, result in found.items():
        result["speed"]["inference_words_per_s"] = WORDS / statistics.median(times[name])
    if to_fold is not None:
        pairs = [(f"{to_fold} {FOLDED}", to_fold)]
        if baseline is not None:
            pairs += [(f"{to_fold} {FOLDED}", baseline), (to_fold, baseline)]
        found[to_fold]["timing"] = {
            "what": f"seconds to decode {WORDS} words step by step, along the right answers",
            "pairs": [{"a": a, "b": b, **ratio(times[a], times[b])} for a, b in pairs],
        }
    for name, result in found.items():
        results.write(folders[name], result)


def _row(fate: Any) -> dict[str, Any]:
    return {"name": fate.name, "norm": fate.norm, "action": fate.action, "into": list(fate.into), "why": fate.why}


def _scores(folded: Loaded) -> dict[str, float]:
    from normkit.lab.data.embedded import SOURCES
    from normkit.lab.train.translation import Translation

    return Translation(folded.run, folded.model, SOURCES[folded.run.data]()).score_greedy()


def _times(models: Mapping[str, Loaded]) -> dict[str, list[float]]:
    from normkit.lab.data.embedded import cmudict
    from normkit.lab.train.pairs import Table

    pairs = cmudict().test
    batch = Table.of([pairs[number * len(pairs) // WORDS] for number in range(WORDS)]).batch(list(range(WORDS)))
    source, given, _ = batch.tensors
    return take_turns({name: lambda m=run.model: decode_along(m, source, given) for name, run in models.items()})


@torch.no_grad()
def decode_along(model: Any, source: Tensor, target: Tensor) -> None:
    """Let a Seq2Seq decode step by step with its cache, as a search does, but along `target`: the same work for all."""
    memory, real = model.encode(source)
    cache: dict = {}
    for step in range(target.shape[1]):
        model.decode(target[:, step : step + 1], memory, real, cache, step).argmax(-1)


def take_turns(calls: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds of each call, several times, one after the other in turns so that a disturbance strikes them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: seconds[1:] for name, seconds in times.items()}  # the first is a warm-up


def ratio(a: list[float], b: list[float]) -> dict[str, float]:
    """Median of the ratios of each turn, with the tenth and the ninetieth percentile.

    >>> ratio([2.0, 2.0, 2.0], [1.0, 2.0, 1.0])["ratio"]
    2.0
    """
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    tenth = len(ratios) // 10
    return {"ratio": statistics.median(ratios), "low": ratios[tenth], "high": ratios[-1 - tenth], "n": len(ratios)}
