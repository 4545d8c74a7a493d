"""Core studies: all norms at all places of one model, on the same data, task by task."""

import dataclasses

from normkit_papers.studies.papers import BASES, SETTINGS
from normkit_papers.study import Bases, Column, Row, Settings, Study, Times, columns, norm_rows

AUTOMATIC = norm_rows("un(warmup='auto')", "power(groups=0, warmup='auto')", "power(groups=1, warmup='auto')")
CORE = (
    *norm_rows("layer", "batch", "pnv", "power(groups=1)"),
    *AUTOMATIC[:2],
    Row("scale + FixNorm", {"model.norm": "scale", "model.fixnorm": True}),
)
# separates FixNorm's gain from ScaleNorm's
FIXED = Row("layer + FixNorm", {"model.norm": "layer", "model.fixnorm": True})
FIXED_UN = Row("un(warmup=auto) + FixNorm", {"model.norm": "un(warmup='auto')", "model.fixnorm": True})
SCALED = tuple(
    dataclasses.replace(row, label=f"{row.label} + scale loss", settings={**(row.settings or {}), "scale_loss": 0.1})
    for row in (AUTOMATIC[0], FIXED_UN)
)
BY_HAND = norm_rows("un")  # warms up as long as the learning rate
OTHERS = norm_rows("rms", "group", "renorm", "mabn(warmup='auto')", "nonorm", "dyt")
WARM_UP = "Without warmup=auto, statistics warm up as long as the learning rate, as in the papers."
THIRD = (
    "At pocket scale the training set is a third of the corpus, and the test 1,000 of its 6,750 lines, evenly spread."
    " Validation perplexity is of 500 lines at every scale."
)
VALID = {"valid perplexity": "perplexity valid"}


def _scores(metric: str) -> dict[str, str]:
    """Metrics of a search, and of greedy decoding with the statistics of training and with calibrated ones."""
    greedy = f"{metric.upper()} greedy"
    return {metric.upper(): metric, greedy: f"{metric} running", "greedy, calibrated": f"{metric} calibrated"}


MULTI30K_CORE = Study(
    id="core.multi30k",
    title="norms in translation, Multi30k De-En",
    note=WARM_UP,
    rows=(*CORE, FIXED, FIXED_UN, *SCALED, *OTHERS),
    columns=columns(BASES["multi30k"], _scores("bleu")),
)

MULTI30K_LONG = Study(
    id="core.multi30k-hour",
    title="norms in translation, an hour of one CPU core each, Multi30k De-En",
    note=WARM_UP,
    rows=(
        *(row for row in CORE if row not in AUTOMATIC),
        *BY_HAND,
        FIXED,
        FIXED_UN,
        *SCALED,
        *AUTOMATIC,
        *(Row(f"{norm}, shuffled", {"model.norm": norm, "bucketing": False}) for norm in ("layer", "batch")),
    ),
    columns=columns(BASES["multi30k_hour"], _scores("bleu")),
)

IWSLT14_CORE = Study(
    id="core.iwslt14",
    title="norms in translation, IWSLT14 De-En",
    rows=(*CORE, *OTHERS),
    note=f"{THIRD} {WARM_UP}",
    columns=columns(BASES["iwslt14_un"], _scores("bleu") | VALID),
)

GERMAN_LONG = Study(
    id="core.iwslt14-long",
    title="norms in translation, 5,000 steps, IWSLT14 De-En",
    rows=(CORE[0], FIXED, AUTOMATIC[0], FIXED_UN, *SCALED),
    note=THIRD,
    columns=columns(BASES["iwslt14_long"], _scores("bleu") | VALID),
)

PTB_CORE = Study(
    id="core.ptb",
    title="norms in a tensorized language model, PTB",
    note=WARM_UP,
    rows=(
        *(row for row in CORE if row.label in ("layer", "batch", "pnv", "power(groups=1)", "un(warmup=auto)")),
        *BY_HAND,
    ),
    columns=columns(
        BASES["ptb"], {"test perplexity": "perplexity", **VALID, "test, calibrated": "perplexity calibrated"}
    ),
)

WIKITEXT2_CORE = Study(
    id="core.wikitext-2",
    title="norms in a language model, WikiText-2",
    note=WARM_UP,
    rows=norm_rows("layer", "un"),
    columns=columns(BASES["wikitext2"], {"test perplexity": "perplexity", **VALID}),
)

MODERN = ("layer", "rms", "un", "power(groups=0)", "dyt", "derf")
OPTIMIZERS = {"AdamW": ("adamw", ("1e-3", "3e-3", "1e-2")), "Muon": ("muon", ("3e-3", "1e-2", "3e-2"))}
LANGUAGE_MODELS = Study(
    id="core.language-models-rates",
    title="learning rates of norms in language models of today's kind, AdamW and Muon, Python reference",
    note=f"Validation perplexity. Muon trains the matrices of the blocks, AdamW the rest, at one rate. {WARM_UP}",
    rows=norm_rows(*MODERN),
    columns=tuple(
        Column(f"{title}, {lr}", "perplexity valid", BASES["rotary"], {"optimizer": optimizer, "lr": float(lr)})
        for title, (optimizer, rates) in OPTIMIZERS.items()
        for lr in rates
    ),
)

BEST = {"layer": 3e-3, "rms": 1e-2, "un": 3e-3, "un(warmup='auto')": 3e-3, "power(groups=0)": 3e-3, "dyt": 3e-3,
        "derf": 1e-2}  # fmt: skip
"""Rates of AdamW with the best validation perplexity of the study above; with Muon 1e-2 is the best for all."""

BEST_LANGUAGE_MODELS = Study(
    id="core.language-models",
    title="norms in language models of today's kind, AdamW and Muon, each at its best rate, Python reference",
    note=f"The best of three rates by validation perplexity, see core.language-models-rates. {WARM_UP}",
    rows=tuple(
        Row(f"{spec}, {title}".replace("'", ""), {"model.norm": spec, "optimizer": optimizer, "lr": rate})
        for title, (optimizer, _) in OPTIMIZERS.items()
        for spec, rate in ((spec, rate if optimizer == "adamw" else 1e-2) for spec, rate in BEST.items())
    ),
    columns=columns(BASES["rotary"], {"perplexity": "perplexity", "calibrated": "perplexity calibrated", **VALID}),
    seeds=3,
)

DECAY = SETTINGS["ValDecay"]
NO_WARMUP: dict[str, Settings] = {"gpu": DECAY, "paper": {**DECAY, "lr": 3e-4}}  # pocket keeps its cosine

GALICIAN_CORE = Study(
    id="core.ted-gl",
    title="placement, norm, FixNorm, initial weights and warm-up on little data, TED gl-en (as Tears' Tables 2 to 5)",
    rows=tuple(
        Row(
            f"{placement}, {norm}{' + FixNorm' if fixed else ''}, {init}",
            {"model.placement": placement, "model.norm": norm, "model.fixnorm": fixed, "model.init": init},
        )
        for placement in ("post", "pre")
        for norm in ("layer", "scale")
        for fixed in (False, True)
        for init in ("xavier", "small")
    ),
    columns=tuple(
        Column(f"{title}, {start}", metric, BASES["ted_gl"], settings=settings, at=at)
        for title, metric in (("BLEU", "bleu"), ("valid perplexity", "perplexity valid"))
        for start, settings, at in (("warm-up", {}, {}), ("none", {"warmup": 0, "lr": Times(0.607)}, NO_WARMUP))
    ),
    note="Without warm-up at 0.607 of the peak rate, as the paper.",
)

GALICIAN_LONG = Study(
    id="core.ted-gl-long",
    title="norms in translation with little data, 10,000 steps, TED gl-en",
    note=WARM_UP,
    rows=(
        *(row for row in MULTI30K_LONG.rows if "shuffled" not in row.label and row.label != "un"),
        Row("pnv + FixNorm + scale loss", {"model.norm": "pnv", "model.fixnorm": True, "scale_loss": 0.1}),
    ),
    columns=columns(BASES["ted_long"], _scores("bleu") | VALID),
)

CMUDICT_CORE = Study(
    id="core.cmudict",
    title="norms from spelling to sound, CMU Pronouncing Dictionary",
    note=WARM_UP,
    rows=(*CORE, *OTHERS),
    columns=columns(BASES["cmudict"], _scores("per")),
)

IMAGES = (
    *norm_rows("layer", "batch", "mabn(warmup='auto')", "pnv", "power(groups=0, warmup='auto')"),
    *norm_rows("un(warmup='auto', outlier_filtration=True)"),
    Row("un", {"model.norm": "un(outlier_filtration=True)"}),
    Row("un, filtration off", {"model.norm": "un"}),
)

CIFAR10_CORE = Study(
    id="core.cifar10",
    title="norms in image classification, CIFAR-10: tiny ViT and ResNet-20",
    note="At pocket scale ResNet-20 gets the images at half their size, 16 x 16; at gpu scale the ViT is T2T-ViT-14."
    f" {WARM_UP}",
    rows=IMAGES,
    columns=(
        *columns(BASES["cifar10"], {"ViT": "accuracy", "ViT, calibrated": "accuracy calibrated"}),
        *columns(BASES["resnet20"], {"ResNet-20": "accuracy", "ResNet-20, calibrated": "accuracy calibrated"}),
    ),
)

RESNET20_LONG = Study(
    id="core.resnet20-hour",
    title="norms in image classification, an hour of one CPU core each, CIFAR-10, ResNet-20",
    rows=norm_rows(
        "layer", "batch", "pnv", "un(outlier_filtration=True, warmup='auto')", "power(groups=0, warmup='auto')",
        "mabn(warmup='auto')",
    ),
    columns=columns(BASES["resnet20_hour"], {"accuracy": "accuracy", "accuracy, calibrated": "accuracy calibrated"}),
)  # fmt: skip

CIFAR10_SPEED = Study(
    id="core.cifar10-224",
    title="accuracy and time to accuracy by norm, CIFAR-10 at 224 x 224: T2T-ViT-14 and Swin-T",
    note=f"Minutes of training until validation accuracy reaches 80%. {WARM_UP}",
    rows=IMAGES,
    columns=tuple(
        Column(f"{name}, {title}", metric, {"gpu": base["gpu"]})
        for name, base in (("T2T-ViT-14", BASES["cifar10"]), ("Swin-T", BASES["cifar10_swin"]))
        for title, metric in (("accuracy", "accuracy"), ("minutes to 80%", "minutes to 80%"))
    ),
)


def _bucketing(id: str, data: str, metric: str, base: Bases) -> Study:
    """Ask which part of BatchNorm's loss on text is due to batches of sentences of similar length.

    Batch statistics are those of short or of long sentences then, while running statistics are of all sentences.
    """
    norms = ("batch", "pnv", "mabn", "power(groups=1)", "un", "layer")
    ways: dict[str, Settings] = {"bucketed": {}, "shuffled": {"bucketing": False}}
    distances = {"mean": "distance_mean", "variance": "distance_var", "quadratic mean": "distance_quadratic"}
    return Study(
        id=f"bucketing.{id}",
        title=f"batches bucketed by length or shuffled, {data}",
        note="The same number of symbols a batch. Distances are PowerNorm's Figure 2: batch against running statistics"
        " of the first norm, median over the run.",
        rows=tuple(Row(f"{norm}, {way}", {"model.norm": norm, **ways[way]}) for norm in norms for way in ways),
        columns=(
            *columns(base, {f"{metric.upper()} {kind}": f"{metric} {kind}" for kind in ("running", "calibrated")}),
            *columns(base, {f"distance, {title}": name for title, name in distances.items()}),
        ),
    )


BUCKETING = (
    _bucketing("multi30k", "Multi30k De-En", "bleu", BASES["multi30k"]),
    _bucketing("cmudict", "CMU Pronouncing Dictionary", "per", BASES["cmudict"]),
)
