"""Short trainings on real data for the figures and numbers of docs/figures.md.

    NORMKIT_DATA=~/data python benchmarks/figures.py --out runs/figures     # about 20 minutes of one CPU core
    python benchmarks/figures.py --out runs/figures --numbers > docs/pictures/numbers.txt

Names of runs, or how these begin, choose some: `--only mt digits-un`.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
from normkit_papers.cka import cka
from normkit_papers.data.embedded import digits
from normkit_papers.powernorm.recipes import cifar10_resnet20
from normkit_papers.recipes import g2p_cmudict, mt_multi30k, vit_digits
from normkit_papers.report import results
from normkit_papers.report.recorded import BATCH_NORMS, first_sites, recorded
from normkit_papers.train.config import Run
from normkit_papers.train.folder import load
from normkit_papers.train.run import train

from normkit._util import align
from normkit.watch import Appender, Series

UN = "un(outlier_filtration=True, warmup=%d)"
ENCODER = "encoder.*"  # where the papers' PowerNorm and BatchNorm stand in a translation model; LayerNorm elsewhere
SAMPLES = 280
SKIPPED_START = 0.2  # of training, before which nothing is counted


def runs() -> dict[str, Run]:
    """The trainings, by folder."""
    made: dict[str, Run] = {}
    for name, recipe, steps in (("mt", mt_multi30k(), 280), ("g2p", g2p_cmudict(), 1500)):
        short = dataclasses.replace(recipe, steps=steps, warmup=steps // 5, valid_every=0, test_items=20)
        made[f"{name}-batch"] = with_norm(short, "layer", {ENCODER: "batch"})
        if name == "mt":
            made["mt-pnv"] = with_norm(short, "layer", {ENCODER: "pnv"})
        made[f"{name}-un"] = with_norm(short, UN % (steps // 5))
    for norm in ("layer", "batch", UN % 300):
        made[f"digits-{norm[:5].rstrip('(ou')}"] = with_norm(vit_digits(), norm)
    resnet = dataclasses.replace(cifar10_resnet20(), steps=2 * SAMPLES, warmup=56, valid_every=0)
    made["resnet20-batch"] = with_norm(resnet, "batch")
    small = dataclasses.replace(g2p_cmudict(), steps=200, warmup=40, valid_every=0, test_items=100)
    for norm in ("layer", "pnv"):
        for size in (125, 250, 500):
            made[f"size-{norm}-{size}"] = with_norm(dataclasses.replace(small, batch_tokens=size), norm)
    for amount in (0.1, 0.0):
        smooth = dataclasses.replace(small, steps=400, label_smoothing=amount)
        made[f"smoothing-{amount:g}"] = with_norm(smooth, "scale")
    return {
        name: dataclasses.replace(
            run,
            name=name,
            checkpoint_every=0,
            threads=1,
            record_every=max(1, run.steps // SAMPLES),
            quantities=("all",),
        )
        for name, run in made.items()
    }


def with_norm(run: Run, norm: str, norm_at: dict[str, str] | None = None) -> Run:
    """The run with other norms."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, norm=norm, norm_at=norm_at or {}))


def similarity(out: Path) -> None:
    """Add CKA with the LayerNorm model to the rows of the other models (UN, Figure 6)."""
    batches = digits().test[0].split(48)
    layer = load(out / "digits-layer").model
    for name in ("digits-batch", "digits-un"):
        found = load(out / name)
        Appender(out / name / "rows.csv")(cka(layer, batches, found.model).rows(found.run.steps))


def numbers(out: Path) -> str:
    """The numbers of docs/figures.md on text and images, and their origin.

    `first` is the first norm with batch statistics, `all` the median over all of them; `/ sd` in standard deviations.
    """
    names = ("mt-batch", "g2p-batch", "digits-batch", "resnet20-batch")
    chosen = {out / name: results.live(out / name) for name in names if (out / name).is_dir()}
    columns = {"distance_mean": "mean", "drift_mean": "mean / sd", "distance_var": "variance", "g_mu": "g_mu",
               "g_sigma2": "g_sigma2"}  # fmt: skip
    lines = [
        ["run", "norms", *columns.values(), *(f"peak {columns[name]}" for name in columns if name != "drift_mean")]
    ]
    for run in recorded(chosen):
        [(_, first)] = first_sites([run], "distance_mean", *BATCH_NORMS)
        for which in ("first", "all"):
            middles, peaks = [], []
            for quantity in columns:
                sites = run.sites(quantity, *BATCH_NORMS)
                series = [after_start(sites[site], run.steps) for site in ([first] if which == "first" else sites)]
                middles.append(statistics.median(map(statistics.median, series)))
                peaks.append(statistics.median(max(values) / statistics.median(values) for values in series))
            kept = [peak for quantity, peak in zip(columns, peaks, strict=True) if quantity != "drift_mean"]
            count = "first" if which == "first" else f"all {len(run.sites('distance_mean', *BATCH_NORMS))}"
            lines.append([run.settings["name"], count, *(f"{m:.2g}" for m in middles), *(f"{p:.1f}" for p in kept)])
    return "\n".join([align(lines), "", *(origin(path.name, result) for path, result in chosen.items())])


def after_start(series: Series, steps: int) -> list[float]:
    """Finite values after the first fifth of training."""
    return [value for step, value in series.points() if step >= SKIPPED_START * steps]


def origin(name: str, result: dict) -> str:
    """One line on where a run comes from."""
    run, where = result["run"], result["where"]
    settings = json.dumps({key: run[key] for key in ("steps", "batch_tokens", "seed")})[1:-1]
    if not where:
        return f"{name}: {result['status']}, not scored; {settings}"
    state = "with uncommitted changes" if where["dirty"] else "clean"
    return f"{name}: commit {where['commit'][:7]}, {state}; {settings}; {where['device']}; {result['command']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    parser.add_argument("--only", nargs="*", default=[""], help="how names of runs begin, such as mt or digits-un")
    parser.add_argument("--numbers", action="store_true", help="print the numbers of runs that are there")
    given = parser.parse_args()
    if given.numbers:
        print(numbers(given.out))
        return
    torch.set_num_threads(1)
    for name, run in runs().items():
        if name.startswith(tuple(given.only)):
            started = time.process_time()
            result = train(run, given.out / name, command=f"python benchmarks/figures.py --only {name}")
            print(f"{name}: {result['status']}, {time.process_time() - started:.0f} s of CPU", flush=True)
    if all((given.out / f"digits-{norm}" / results.FILE).is_file() for norm in ("layer", "batch", "un")):
        similarity(given.out)


if __name__ == "__main__":
    main()
