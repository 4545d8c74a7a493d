"""Invented results, for tests of tables, figures and pages."""

import csv
import math
import random

from normkit_papers import results

SITES = tuple(
    f"{side}.layers.{i}.{place}_norm"
    for side in ("encoder", "decoder")
    for i in (0, 1)
    for place in ("attention", "feedforward")
)


def score(per, error=0.35, **more):
    return {"loss": 0.5 + per / 40, "per": per, "per_error": error, "n": 2000} | more


def result(norm="layer", per=10.0, *, seed=0, status="done", calibrated=None, **run):
    """A result of task g2p; `run` replaces settings."""
    chance, steps = random.Random(f"{norm} {seed}"), run.get("steps", 500)
    curve = [
        {"step": step, "train_loss": 1 + 3 * math.exp(-step / 40) + chance.gauss(0, 0.04)} for step in range(steps)
    ]
    valid = [{"step": step, "loss": 1.05 + per / 50 + 2 / step} for step in range(steps // 5, steps + 1, steps // 5)]
    scores = {"running": score(per), "beam": score(per - 0.4)} if status == "done" else {}
    if calibrated is not None:
        scores["calibrated"] = score(calibrated)
    model = {"width": 96, "norm": norm, "norm_at": {}, "fixnorm": norm == "scale"}
    settings = {"name": norm, "task": "g2p", "data": "cmudict", "model": model, "steps": steps, "batch_tokens": 500}
    where = {"commit": "0123456789abcdef", "dirty": False, "torch": "2.13.0", "device": "a processor", "threads": 1}
    return {
        "schema": 1,
        "run": settings | {"label_smoothing": 0.1, "seed": seed} | run,
        "command": "papers demo",
        "status": status,
        "where": where | {"time": "2026-01-01T00:00:00+00:00"},
        "parameters": 381547,
        "curve": curve,
        "valid": valid,
        "scores": scores,
        "speed": {"train_tokens_per_s": 9000.0},
        "fold": None,
        "seconds": {"train": 120.0, "score": 10.0},
    }


def write(folder, made, quantities=(), sites=SITES):
    """Write a run folder with result.json and a rows.csv of invented quantities."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder, made)
    norm, steps, chance = made["run"]["model"]["norm"], made["run"]["steps"], random.Random(str(folder))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "site", "norm", "quantity", "value"))
        for step in range(1, steps, max(1, steps // 40)):
            for quantity in quantities:
                places = [("", "")] if quantity == "gradient_norm" else [(site, norm) for site in sites]
                for place in places:
                    writer.writerow((step, *place, quantity, f"{math.exp(chance.gauss(0, 0.5)):.4g}"))
    return folder
