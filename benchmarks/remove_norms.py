"""Compare recipes that take the norms out of trained models.

    normkit train g2p_cmudict --steps 3600 --warmup 360 --seeds 3 --out runs/g2p
    python benchmarks/remove_norms.py runs/g2p/seed-{0,1,2} --out results/remove-norms-g2p.json

Each row is one run of ours (LayerNorm), one recipe and one number of steps:

- "original": not changed; "trained on": the original, fine-tuned on labels likewise, the fair control;
- "calibrated": norms replaced, statistics measured, then trained on the statistics of batches (the recipe until 0.2);
- "fitted": gains and biases fitted by least squares (`fit_norms`), then trained with frozen statistics;
- "fitted, batches": fitted, then trained on the statistics of batches and calibrated;
- "blend": LayerNorm fades out over the first 60 % of the steps; "staged": site by site over the first 60 %, in the
  default order; "staged, in order": from the first norm to the last; "staged, scales": staged with 0.1 times the scale
  loss; these end calibrated.

0 steps of "calibrated" and "fitted" show where training starts. The loss is that of the task ("labels"), the distance
from the outputs and inner activations of the original ("outputs"), or their sum ("both"). Scores are those of the task
on the test split by greedy search; the tail is the loss of single tokens of the validation split. "beta2" is AdamW's
second momentum; rows with 0.999 had a warm-up of 20 steps. Rows that the file has are not repeated.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from normkit_papers.train.distill import BETAS, Distillation, fit
from normkit_papers.train.environment import environment
from normkit_papers.train.removable import RemovableRun
from normkit_papers.train.removal import FITTED, summarize
from torch import nn

from normkit.fold import fold
from normkit.models import blend, calibrate, convert, find, fit_norms, scale_loss, settle
from normkit.norms import StatNorm

RECIPES = (
    "trained on", "calibrated", "fitted", "fitted, batches", "blend", "staged", "staged, in order", "staged, scales",
)  # fmt: skip
CALIBRATED = 100  # batches


def start(recipe: str, subject: RemovableRun, spec: str, steps: int, calibration: list) -> nn.Module:
    """Return the model that a recipe trains."""
    original = subject.model
    if recipe == "trained on":
        return copy.deepcopy(original)
    if recipe == "calibrated":
        return calibrate(convert(original, spec), calibration, forward=subject.forward, passes=4)
    if recipe.startswith("fitted"):
        return fit_norms(convert(original, spec), original, calibration[:FITTED], forward=subject.forward)
    if recipe == "blend":
        return blend(original, spec, steps=max(1, int(0.6 * steps)))
    order = list(find(original)) if recipe == "staged, in order" else None
    return blend(original, spec, steps=1, gap=max(1, int(0.6 * steps / len(find(original)))), order=order)


def run(recipe: str, subject: RemovableRun, given: argparse.Namespace, steps: int, seed: int) -> dict:
    """Apply one recipe; return its row."""
    began = time.process_time()
    calibration = [batch for batch, _ in zip(subject.batches(0), range(CALIBRATED), strict=False)]
    model = start(recipe, subject, given.spec, steps, calibration)
    sites = list(find(subject.model))
    distillation = Distillation(subject.model, subject.outputs, sites)
    labels = given.loss != "outputs"
    if steps:
        with scale_loss(model) as scales:

            def loss(model, batch):
                terms = {"labels": subject.loss, "outputs": distillation}
                value = sum(term(model, batch) for name, term in terms.items() if given.loss in (name, "both"))
                spread = scales()
                return value + 0.1 * spread if recipe == "staged, scales" else value

            frozen = recipe in ("trained on", "fitted")
            fit(
                model, loss, lambda at: subject.batches(1000 + 7919 * seed + at), steps=steps,
                lr=given.lr or subject.lr, dropout=labels, frozen=frozen,
            )  # fmt: skip
        if recipe == "blend" or recipe.startswith("staged"):
            model = settle(model)
        if not frozen:
            model = calibrate(model, calibration, forward=subject.forward)
    row = {"recipe": recipe, "steps": steps, "loss": given.loss, "spec": given.spec, "lr": given.lr or subject.lr,
           "cpu_seconds": round(time.process_time() - began, 1)}  # fmt: skip
    if any(isinstance(module, StatNorm) for module in model.modules()) and not subject.loaded.run.model.tie:
        example = [tensor[:2] for tensor in calibration[0].tensors[: 2 if subject.has_padding else 1]]
        model, report = fold(model.eval(), *example)
        row |= {"folded": report.foldable, "max_error": report.max_error}
    return {**row, **subject.quality(model.eval()), "tail": summarize(subject.tail(model)[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="trained runs with LayerNorm, one a seed")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100, 300, 1000])
    parser.add_argument("--loss", choices=("labels", "outputs", "both"), default="labels")
    parser.add_argument("--spec", default="un(warmup=0)")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {"what": str(__doc__).splitlines()[0], "rows": [], "where": environment("cpu")}
    if given.out.is_file():
        result = json.loads(given.out.read_text(encoding="utf8"))
    for seed, folder in enumerate(given.runs):
        subject = RemovableRun(folder)
        plan = [("original", 0), *((recipe, n) for n in given.steps for recipe in given.recipes)]
        for recipe, steps in plan:
            if recipe not in ("calibrated", "fitted", "original") and not steps:
                continue
            key = {"run": folder.name, "recipe": recipe, "steps": steps, "spec": given.spec,
                   "loss": given.loss, "lr": given.lr or subject.lr, "beta2": BETAS[1]}  # fmt: skip
            if any(all(row.get(k) == v for k, v in key.items()) for row in result["rows"]):
                continue
            if recipe == "original":
                found = {**key, **subject.quality(subject.model), "tail": summarize(subject.tail(subject.model)[1])}
            else:
                found = run(recipe, subject, given, steps, seed)
            row = {**key, "seed": seed, **found}
            result["rows"].append(row)
            print({k: v for k, v in row.items() if k != "tail"}, row["tail"], flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
