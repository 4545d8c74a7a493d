"""Invented results, for tests of tables, figures and pages."""

import csv
import math
import random

WITH_STATISTICS = ("un", "power", "pnv", "batch")
SITES = tuple(
    f"{side}.layers.{i}.{place}_norm"
    for side in ("encoder", "decoder")
    for i in (0, 1)
    for place in ("attention", "feedforward")
)


WHERE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "normkit": "0.1.0",
    "torch": "2.13.0",
    "lightning": "2.6.6",
    "python": "3.11.7",
    "platform": "Linux",
    "device": "a processor",
    "time": "2026-01-01T00:00:00+00:00",
}


def outcome(name, norm, action, *into):
    why = "" if into else "its statistics are of the token"
    return {"name": name, "norm": norm, "action": action, "into": list(into), "why": why}


def score(per, error=0.35, **more):
    return {
        "loss": 0.5 + per / 40,
        "per": per,
        "per_error": error,
        "wer": 3.5 * per,
        "wer_error": 1.0,
        "n": 2000,
    } | more


def result(norm="layer", per=10.0, *, seed=0, status="done", statistics=None, **run):
    """A result; `statistics` = (donors, calibrated) for a norm with batch statistics."""
    chance = random.Random(f"{norm} {seed}")
    steps = 5000
    curve = [
        {"step": step, "train_loss": 1 + per / 50 + 3 * math.exp(-step / 400) + chance.gauss(0, 0.04), "lr": 3e-3}
        for step in [1, *range(25, steps + 1, 25)]
    ]
    valid = [{"step": step, "loss": 1.05 + per / 50 + 2 * math.exp(-step / 500)} for step in range(500, steps + 1, 500)]
    scores = {}
    if status == "done":
        scores = {"running": score(per), "beam": score(per - 0.4)}
        if statistics:
            scores |= {"donors": score(statistics[0]), "calibrated": score(statistics[1])}
    else:
        curve, valid = curve[:60], valid[:2]
    model = {"width": 96, "depth": 2, "heads": 4, "norm": norm, "norm_at": {}, "fixnorm": norm == "scale"}
    settings = {"name": f"demo {norm}", "task": "g2p", "data": "cmudict", "model": model, "steps": steps, "lr": 3e-3}
    settings |= {"betas": [0.9, 0.98], "bucketing": True, "batch_tokens": 500, "seed": seed} | run
    return {
        "schema": 1,
        "run": settings,
        "command": "normkit demo --steps 5000",
        "status": status,
        "where": WHERE | {"threads": 1},
        "parameters": 381547,
        "curve": curve,
        "valid": valid,
        "scores": scores,
        "speed": {"train_tokens_per_s": 9000.0, "train_words_per_s": 1200.0 + per, "inference_words_per_s": 800.0},
        "fold": {"foldable": "0 of 2", "max_error": None, "rows": [outcome("encoder.final_norm", norm, "kept")]},
        "timing": None,
        "seconds": {"train": 100.0, "score": 10.0},
    }


def demo(folder):
    """Results of six norms, as `results.find` returns them, with files of rows."""
    made = {
        folder / "layer": result("layer", 9.9),
        folder / "scale": result("scale", 10.1),
        folder / "un": result("un(warmup=500)", 10.2, statistics=(10.1, 10.1)),
        folder / "power": result("power(groups=0, warmup=500)", 10.7, statistics=(10.5, 10.6)),
        folder / "pnv": result("pnv", 13.9, statistics=(9.9, 10.4)),
        folder / "batch": result("batch", 21.3, statistics=(9.7, 12.0)),
    }
    un = made[folder / "un"]
    un["scores"]["folded"] = score(10.2)
    outcomes = [outcome(site, "un(warmup=500)", "folded", "query", "key") for site in SITES]
    un["fold"] = {"foldable": "9 of 10", "max_error": 3e-14, "native_error": 2e-6, "rows": outcomes}
    un["timing"] = {"what": "seconds to decode 256 words", "pairs": [
        {"a": "un folded", "b": "un", "ratio": 0.86, "low": 0.84, "high": 0.9, "n": 15},
        {"a": "un folded", "b": "layer", "ratio": 0.97, "low": 0.93, "high": 1.02, "n": 15}]}  # fmt: skip
    for place in made:
        if place.name in WITH_STATISTICS:
            rows(place, made[place]["run"]["model"]["norm"])
    return made


def rows(folder, norm, scale=None):
    """Write a rows.csv of distances."""
    chance = random.Random(norm)
    scale = scale or {"batch": 0.1, "pnv": 0.04}.get(norm, 0.004)
    quantities = ("distance_mean", "distance_var") if norm == "batch" else ("distance_quadratic",)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "site", "norm", "quantity", "value"))
        for step in range(1, 5000, 25):
            for site in SITES:
                for quantity in quantities:
                    value = scale * (1 + len(site) / 30) * math.exp(chance.gauss(0, 0.5) + math.exp(-step / 500))
                    writer.writerow((step, site, norm, quantity, f"{value:.6g}"))
