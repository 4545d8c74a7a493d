"""The demo: train one model with each of several norms alike, then fold one and time it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.bench import ROUNDS, measure
from normkit.norms import parse
from normkit_papers import results
from normkit_papers.data.batches import spread
from normkit_papers.recipes import RECIPES
from normkit_papers.study import slug, warmed
from normkit_papers.train.config import Run
from normkit_papers.train.fold_run import audit_run, fold_run
from normkit_papers.train.folder import load, save
from normkit_papers.train.source import open_task

WORDS = 64  # words that are decoded together for timing
FOLDED = "folded"  # folder of the folded model, in that of its run


def runs(norms: Sequence[str], out: Path, steps: int, seed: int = 0) -> dict[Path, Run]:
    """Make the runs of the demo by folder, one per norm spec.

    `scale` comes with FixNorm. Statistics end their warm-up by drift, unless the spec sets `warmup`.

    Raises:
        ValueError: If a spec is unknown or given twice, or there is none.

    >>> [str(folder) for folder in runs(("layer", "power(groups=0)"), Path("runs/demo"), 100)]
    ['runs/demo/layer', 'runs/demo/power-groups=0']
    """
    found: dict[Path, Run] = {}
    recipe, tenth = RECIPES["g2p_cmudict"](), max(1, steps // 10)
    for spec in norms:
        fixnorm = parse(spec)[0] == "scale"  # FixNorm normalizes the embedding, to which the output is tied then
        norm = warmed(spec, tenth, automatic=True)
        model = dataclasses.replace(recipe.model, norm=norm, fixnorm=fixnorm, tie=fixnorm)
        folder = out / slug(spec)
        if folder in found:  # also 'un' and 'un()'
            raise ValueError(f"{spec!r} is given twice; give each norm once")
        name = f"{spec} + FixNorm" if fixnorm else spec
        found[folder] = dataclasses.replace(
            recipe, name=name, model=model, steps=steps, warmup=tenth, valid_every=tenth, checkpoint_every=0,
            record_every=max(1, steps // 200), seed=seed, device="cpu",
        )  # fmt: skip
    if not found:
        raise ValueError("no norm is given; give some, as in --norms layer un")
    return found


def fold_and_time(folders: Sequence[Path], rounds: int = ROUNDS) -> None:
    """Fold the first run whose norms all fold, score it again, and time all models.

    The result of each run gets `fold`: how many norms fold away; seconds to decode 64 words as trained and, of the
    folded run, as folded.
    """
    loaded = {folder: load(folder) for folder in folders}
    found = {folder: results.read(folder) for folder in folders}
    models = {folder: run.model for folder, run in loaded.items()}
    for folder, run in loaded.items():
        found[folder]["fold"] = {"foldable": audit_run(run).foldable, "max_error": None}
    whole = [folder for folder in folders if len(set(found[folder]["fold"]["foldable"].split(" of "))) == 1]
    chosen = next((folder for folder in whole if loaded[folder].run.model.norm.startswith("un")), *whole[:1] or [None])
    if chosen is not None:
        folded, report = fold_run(loaded[chosen])
        save(chosen / FOLDED, folded)
        models[chosen / FOLDED] = folded.model
        found[chosen]["fold"] |= {"max_error": report.max_error, "native_error": report.native_error}
        found[chosen]["scores"]["folded"] = open_task(folded).score_test()
    seconds, obstacle = _time(models, rounds)
    for place in models:
        size = (place / "model.safetensors").stat().st_size
        fold = found[chosen if place not in found else place]["fold"]  # type: ignore[index]
        kind = "folded" if place not in found else "trained"
        fold |= {f"seconds_{kind}": seconds[place], f"megabytes_{kind}": size / 1e6, "obstacle": obstacle}
    for folder, result in found.items():
        results.write(folder, result)


def _time(models: Mapping[Path, Any], rounds: int) -> tuple[dict[Path, float], str | None]:
    """Median seconds to decode the same words with each model, by turns; and why no verdict is possible."""
    from normkit_papers.data.embedded import cmudict

    pairs = cmudict().test
    source, given, _ = pairs.batch(spread(len(pairs), WORDS)).tensors
    timings = measure(
        {str(place): lambda m=model: decode_along(m, source, given) for place, model in models.items()}, rounds
    )
    return {place: timings.median(str(place)) for place in models}, timings.obstacle or None


@torch.no_grad()
def decode_along(model: Any, source: Tensor, target: Tensor) -> None:
    """Decode `source [batch, time]` along a given `target`, so that all models do the same work."""
    memory, real = model.encode(source)
    cache: dict = {}
    for step in range(target.shape[1]):
        model.decode(target[:, step : step + 1], memory, real, cache, step).argmax(-1)
