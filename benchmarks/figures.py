"""Short trainings on real data whose recorded rows become the pictures of docs/figures.md.

    NORMKIT_DATA=../shared/data python benchmarks/figures.py --out runs/figures
    for id in pn.figure2 pn.figure3 pn.figure4 un.figure3 un.figure4 un.figure5; do
        normkit figure $id runs/figures --out docs/pictures/$id.svg; done

Each takes at most three minutes of one CPU core. A picture takes from a folder of runs those that it can show.
"""

import argparse
import dataclasses
import time
from pathlib import Path

from normkit.studies.recipes import g2p_cmudict, mt_multi30k, vit_digits
from normkit.train.run import train

UN = "un(outlier_filtration=True, warmup=%d)"
ENCODER = "encoder.*"  # where the papers' PowerNorm and BatchNorm stand in a translation model; LayerNorm elsewhere


def runs() -> dict:
    """The trainings, by folder."""
    text = {"mt": (mt_multi30k(), 280), "g2p": (g2p_cmudict(), 1500)}
    made = {}
    for name, (recipe, steps) in text.items():
        short = dataclasses.replace(
            recipe, steps=steps, warmup=steps // 5, valid_every=0, checkpoint_every=0, test_items=20, threads=1
        )
        for norm in ("batch", "pnv"):
            model = dataclasses.replace(recipe.model, norm="layer", norm_at={ENCODER: norm})
            made[f"{name}-{norm}"] = dataclasses.replace(short, model=model)
        model = dataclasses.replace(recipe.model, norm=UN % (steps // 5))
        made[f"{name}-un"] = dataclasses.replace(short, model=model)
    pictures = vit_digits()
    for name, norm in (("batch", "batch"), ("un", UN % 300)):
        model = dataclasses.replace(pictures.model, norm=norm)
        made[f"digits-{name}"] = dataclasses.replace(pictures, model=model, checkpoint_every=0, threads=1)
    return {
        name: dataclasses.replace(run, name=name, record_every=max(1, run.steps // 280), quantities=("all",))
        for name, run in made.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    parser.add_argument("--only", nargs="*", help="names of runs, such as mt-un")
    given = parser.parse_args()
    for name, run in runs().items():
        if given.only and name not in given.only:
            continue
        started = time.process_time()
        result = train(run, given.out / name, command=f"python benchmarks/figures.py --only {name}")
        print(f"{name}: {result['status']}, {time.process_time() - started:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
