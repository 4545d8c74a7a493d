"""Remove the norms of a trained model."""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit._util import is_int, is_number, require, require_functions, warn
from normkit.fold import Report
from normkit.fold import fold as fold_model
from normkit.fold.report import UNEVEN
from normkit.models import calibrate, convert, find
from normkit.models.checks import check_not_meta, check_not_wrapped
from normkit.models.invoke import Call, Forward, Pick, arguments, call, check_batches
from normkit.models.scale_loss import scale_loss
from normkit.norms import StatNorm, parse
from normkit.removal.blocks import blocks_of, train_blocks
from normkit.removal.budget import Cost, Score, choose
from normkit.removal.distill import Comparison, Loss, mask_of, train
from normkit.removal.large_tokens import Bounded, add_clamps, clamp_writers, clamps_first

TO = "un(warmup=0)"  # the norm that is trained and folded
STEPS = 300  # of training
LR, BLOCK_LR = 3e-4, 1e-3  # of the model and of single blocks
IN_MEMORY = 32  # batches whose streams are in memory while blocks are trained
FITTED = 8  # batches that gains and biases are fitted to
SCALES = 0.1  # weight of the scale loss where norms are clamped: streams of a language model drift apart without it
CALIBRATED = 100  # batches that statistics are measured on after training on the statistics of batches
KEPT = {  # by unit what kept runs have: papers/results/remove-norms.csv and remove-norms-lm.csv
    "next token": "SmolLM2-135M rose by 1.1 in 8 steps of each block and of the whole, and by 0.10 in 96",
    "cosine": "MiniLM, on 48 tokens, has 0.14 before training, 0.009 after 600 steps and 0.006 after 2,400; the "
    "nearest other text is the same for 38, 84 and 88 % of its texts",
    "nats": "a translation model has 3.1 before training, 0.15 after 300 steps and 0.01 after 2,000; its BLEU is 2.5, "
    "38.5 and 39.8, that of the original 40.4",
}
UNITS = {
    True: "Kullback-Leibler divergence of the logits from the original's, in nats",
    False: "1 - cosine of outputs (of the mean over tokens)",
}


@dataclass(frozen=True)
class Removal:
    """Result of `remove_norms`; prints with a verdict.

    Attributes:
        fold: The report of folding.
        scores: By stage: "original"; "fitted", before any training; "without norms", the folded model. Lower is better.
        unit: What a score is.
        steps: Training steps; 0 with a budget.
        costs: With a budget, what each norm costs, in the order in which they run.
        budget: Largest rise of the score, or None.
        forwards: With a budget, how often the batches of the fit or of the score went through a model.
    """

    fold: Report
    scores: dict[str, float]
    unit: str
    steps: int
    costs: tuple[Cost, ...] = ()
    budget: float | None = None
    forwards: int = 0

    @property
    def rise(self) -> float:
        """Rise of the score from the original to the model without norms."""
        return self.scores["without norms"] - self.scores["original"]

    @property
    def stay(self) -> str:
        """Which norms stay, by block."""
        blocks = dict.fromkeys(cost.block for cost in self.costs if not cost.gone)
        return f" Norms stay in {', '.join(blocks)}." if blocks else ""

    @property
    def verdict(self) -> str:
        """What the numbers mean, in words."""
        if self.budget is not None:
            gone, most = sum(cost.gone for cost in self.costs), max(cost.alone for cost in self.costs)
            return (
                f"{gone} of {len(self.costs)} norms can go for {self.rise:.3g} of a budget of {self.budget:g}, without "
                f"training. The most expensive norm alone costs {most:.3g}. This took {self.forwards} forwards."
                f"{self.stay}"
            )
        learned = self.scores["without norms"] < self.scores["fitted"]
        text = f"The score is {abs(self.rise):.2g} {'worse' if self.rise > 0 else 'better'} than the original's. "
        text += (
            f"More steps than {self.steps} lower it."
            if learned
            else "Training did not help: try a lower learning rate."
        )
        return text + next((f" To compare: {kept}." for unit, kept in KEPT.items() if unit in self.unit), "")

    def __str__(self) -> str:
        scores = ", ".join(f"{stage} {score:.4g}" for stage, score in self.scores.items())
        return f"{self.fold}\n\n{self.unit}: {scores}\n{self.verdict}"


def remove_norms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    budget: float | None = None,
    held_out: Sequence[Any] | None = None,
    outputs: Pick | None = None,
    logits: bool | None = None,
    forward: Forward | None = None,
    loss: Loss | None = None,
    score: Score | None = None,
    unit: str = "",
    clamp: bool = False,
    lr: float | None = None,
    fold: Callable[[nn.Module], tuple[nn.Module, Report]] | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_progress: Callable[[str, int, int, float], object] | None = None,
) -> tuple[nn.Module, Removal]:
    """Return a model without its norms, and a report; the model is not changed.

    Norms are converted to ones with frozen statistics and fitted to the original's by least squares. The model is then
    trained a little, towards the original's outputs and what its norms return (embeddings stay), or with your loss
    (on the statistics of batches, calibrated at the end).
    With `clamp` each block is trained alone first, towards the original's block. The result is folded, and verified
    in float64. With `budget` nothing is trained: the norms that the model can lose within the budget go, the others
    stay.

    Args:
        model: The trained model, on the device where it shall be trained.
        batches: Inputs: mappings of keywords, tuples of arguments, or single arguments. The first 8 serve the fit.
            They are repeated if there are fewer than `steps`. The key `attention_mask` of a batch masks padding.
        steps: Training steps; some hundred towards the original's outputs, a thousand with labels. None for 300. With
            `clamp` first as many of each block.
        budget: Largest rise of the score, in its unit; None to train.
        held_out: Batches to score on. None scores on those of the fit, which flatters.
        outputs: Picks the tensor to compare from what the model returns; None for logits or hidden states.
        logits: True if these are logits; None if the model's output calls them so.
        forward: Called as `forward(model, batch)` in place of the model.
        loss: Called as `loss(model, batch)`: train on it, with dropout. None for the distance from the original.
        score: Called as `score(model)`; lower is better. None for the distance from the original.
        unit: What `score` is, for the report.
        clamp: Clamp each channel of what stands in a norm's place to the range of what the norm returned. Without
            norms nothing else bounds the product in a gated MLP. With training the layers that write tokens much
            larger than others are clamped, too, and without `loss` each block is trained alone first.
        lr: Highest learning rate. None for 3e-4, and for 1e-3 block by block. Without norms nothing bounds activations:
            a third of the model's own, or less.
        fold: Called as `fold(model)` in place of `normkit.fold` on the first batch.
        seed: Seed of dropout.
        checkpoint: File that training writes every 50 steps, or after each block, then one with `.whole` behind its
            name. If it exists, training continues; give equal arguments.
        on_progress: Called as `on_progress(stage, done, of, seconds left)`.

    Returns:
        The folded model, in which some norms stay with `budget`, and clamps in their place with `clamp`; a report with
        the scores by stage, the outcome of each norm, and a `verdict` in words.

    Raises:
        ValueError: If an argument is wrong, the model has no norms, batches are missing or the loss is not finite.
        TypeError: If `batches` is a single batch.

    Examples:
        >>> import torch, normkit
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> folded, report = normkit.remove_norms(model, [torch.randn(32, 4) for _ in range(8)], steps=20)
        >>> folded[1], report.fold.foldable
        (Identity(), '1 of 1')
    """
    if budget is not None and steps is not None:
        raise ValueError("remove_norms(budget=) trains nothing; leave out steps=")
    steps = STEPS if steps is None else steps
    _check(model, batches, steps, budget, lr)
    require_functions(outputs=outputs, forward=forward, loss=loss, score=score, fold=fold)
    if forward is not None and fold is None:
        raise ValueError("remove_norms(forward=) needs fold= too: a function that folds the model on an example")
    if budget is not None and loss is not None:
        raise ValueError("remove_norms(budget=) trains nothing; leave out loss=")
    progress = _Progress(on_progress)
    torch.manual_seed(seed)
    original = copy.deepcopy(model).eval()
    iterator = iter(batches)
    first = list(islice(iterator, FITTED))
    if not first:
        raise ValueError("remove_norms() was given no batches")
    data = _endless(batches, first, iterator)
    with torch.no_grad():
        found = call(original, first[0], forward)
    compare = Comparison(original, outputs, hasattr(found, "logits") if logits is None else logits, forward)
    measured = first if held_out is None else list(held_out)
    unit = UNITS[compare.logits] if score is None else unit or "score"
    scored: Score = score or functools.partial(compare.mean, batches=measured)
    mask_from = "attention_mask" if mask_of(first[0]) is not None else None
    teacher = copy.deepcopy(original) if clamp else original
    if clamp:
        if budget is None:
            clamp_writers(teacher, first, forward)
        add_clamps(teacher, first, forward)
    converted = convert(teacher, TO, mask_from=mask_from).eval()
    example = arguments(first[0])
    folding = fold or functools.partial(_fold, example=example, outputs=outputs)

    def folded_and_scored(model: nn.Module) -> tuple[nn.Module, Report]:
        progress("folding", 0, 1)
        places = {f"{name}.1": name for name, module in model.named_modules() if isinstance(module, Bounded)}
        clamps_first(model)
        folded, report = folding(model)
        rows = tuple(replace(row, name=places.get(row.name, row.name)) for row in report.rows)
        report = replace(report, rows=rows)
        scores["without norms"] = scored(folded)
        return folded, report

    scores = {"original": scored(original)}
    if budget is not None:
        chosen = choose(
            teacher, converted, first, scored, scores["original"], budget, forward=forward, on_progress=progress
        )
        folded, report = folded_and_scored(chosen.model)
        return folded, Removal(report, scores, unit, 0, chosen.costs, budget, chosen.forwards)
    calibrate(
        converted, first, like=teacher, forward=forward, on_progress=functools.partial(progress, "fitting norm"),
        inplace=True,
    )  # fmt: skip
    scores["fitted"] = scored(converted)
    progress("folding once, before the training", 0, 1)  # what fails there fails now, not in an hour
    trial = copy.deepcopy(converted)
    clamps_first(trial)
    if (factor := folding(trial)[1].largest_factor) > UNEVEN:
        warn(
            f"folding multiplies weights of this model by up to {factor:.1g}, as in post-norm models; float16 and "
            "8-bit integers cannot hold that. For these begin again with --multiply-adds, or in Python with "
            "fold(..., multiply_adds=True) in fold="
        )
    if clamp and loss is None and blocks_of(teacher, first[0], forward):
        train_blocks(
            converted, teacher, list(islice(data, min(steps, IN_MEMORY))), steps=steps, lr=lr or BLOCK_LR, seed=seed,
            forward=forward, checkpoint=checkpoint,
            on_step=lambda step, of: progress("training blocks, step", step, of),
        )  # fmt: skip
        checkpoint = checkpoint and checkpoint.with_name(f"{checkpoint.name}.whole")  # of the training that follows
    sites = [name for name, module in converted.named_modules() if isinstance(module, StatNorm)]
    distance = compare._replace(original=teacher).loss(sites)
    with contextlib.ExitStack() as entered:
        if loss is None:
            entered.enter_context(_tables_kept(converted))
        scales = entered.enter_context(scale_loss(converted)) if clamp and loss is None else None
        train(
            converted, loss or (lambda m, x: distance(m, x) + (SCALES * scales() if scales else 0)), data,
            steps=steps, lr=lr or LR, dropout=loss is not None, frozen=loss is None, checkpoint=checkpoint,
            on_step=lambda step, _: progress("training, step", step, steps),
        )  # fmt: skip
    if loss is not None:
        calibrate(converted, islice(data, CALIBRATED), forward=forward, inplace=True)
    folded, report = folded_and_scored(converted)
    return folded, Removal(report, scores, unit, steps)


class _Progress:
    """Reports done and all items of a stage, with the seconds left."""

    def __init__(self, tell: Callable[[str, int, int, float], object] | None):
        self.tell, self.stage, self.first, self.started = tell, "", 0, 0.0

    def __call__(self, stage: str, done: int, of: int) -> None:
        if stage != self.stage:
            self.stage, self.first, self.started = stage, done, time.monotonic()
        past = done - self.first
        left = (time.monotonic() - self.started) / past * (of - done) if past else float("nan")
        if self.tell is not None:
            self.tell(stage, done, of, left)


def _endless(batches: Iterable[Any], first: Sequence[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Yield the first batches and the rest; then all again, if `batches` is no generator."""
    yield from first
    yield from rest
    while rest is not batches:
        yield from batches


def _fold(model: nn.Module, example: Call, outputs: Pick | None) -> tuple[nn.Module, Report]:
    return fold_model(model, *example.args, outputs=outputs, **example.kwargs)


@contextlib.contextmanager
def _tables_kept(model: nn.Module) -> Iterator[None]:
    """Keep embeddings: Adam would move the row of a rare token by a full step."""
    tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters() if p.requires_grad}
    for table in tables:
        table.requires_grad_(False)
    yield
    for table in tables:
        table.requires_grad_(True)


def _check(model: Any, batches: Any, steps: Any, budget: Any, lr: Any) -> None:
    check_not_wrapped(model, "remove_norms")
    check_not_meta(model, "remove_norms")
    check_batches(batches, "remove_norms()")
    require(is_int(steps) and steps >= 1, "steps", steps, "a whole number of at least 1")
    require(budget is None or (is_number(budget) and budget >= 0), "budget", budget, "a number of at least 0")
    require(lr is None or (is_number(lr) and 0 < lr < float("inf")), "lr", lr, "a finite number above 0")
    if all(parse(norm.kind)[0] == "nonorm" for norm in find(model).values()):
        raise ValueError("the model has no norms left to remove")
