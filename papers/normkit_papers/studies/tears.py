"""Transformers without Tears (Nguyen and Salazar, 2019): Tables 2 to 8, Figures 1 to 4."""

from types import MappingProxyType

from normkit_papers.bases import IWSLT15_VI, TED, WMT14_DE
from normkit_papers.study import Bases, Column, Row, Settings, Study, Times, columns

POST, PRE = {"model.placement": "post"}, {"model.placement": "pre"}
XAVIER, SMALL = {"model.init": "xavier"}, {"model.init": "small"}
LAYER, SCALE, RMS = ({"model.norm": norm} for norm in ("layer", "scale", "rms"))
FIXED_G = {"model.norm": "scale(learn=False)", "model.norm_at": {"decoder.final_norm": "scale"}}  # FixNorm's is learned
PLAIN, FIX = {"model.fixnorm": False}, {"model.fixnorm": True}

# Eq. 7: the peak is lambda / sqrt(d * warmup), so that half the warm-up has sqrt(2) times the peak
WARMUPS = {
    "4k": {"warmup": Times(0.5), "lr": Times(2**0.5)},
    "8k": {},
    "16k": {"warmup": Times(2), "lr": Times(0.5**0.5)},
}
DECAY = {"schedule": "validation_decay"}
TWICE = {"lr": Times(2)}
NO_WARMUP = {**DECAY, "warmup": 0, "lr": Times(0.607)}  # 3e-4 against a peak of 1 / sqrt(512 * 8000)
RATE = {"paper": {"lr": 3e-4}}  # of NO_WARMUP
FEWER: Settings = {"steps": 1000}  # of a model twice as deep, in as many minutes
DEEP: Settings = {"model.depth": 4, **FEWER}

PAIRS = {"gl-en": TED["gl"], "sk-en": TED["sk"], "en-vi": IWSLT15_VI, "en-he": TED["he"], "ar-en": TED["ar"]}


def _pairs(metric: str) -> tuple[Column, ...]:
    return tuple(Column(pair, metric, base) for pair, base in PAIRS.items())


def _valid(title: str, settings: Settings, pocket: Settings = MappingProxyType({})) -> Column:
    at = {"pocket": pocket}
    return Column(title, "bleu valid", IWSLT15_VI, settings=settings, at=at)


TABLE2 = Study(
    id="tears.table2",
    title="BLEU on the development set of en-vi by steps of warm-up, Xavier and SmallInit",
    claim="PostNorm needs SmallInit to converge; PreNorm always does.",
    columns=tuple(_valid(title, settings) for title, settings in WARMUPS.items()),
    rows=(
        Row("Xavier PostNorm", XAVIER | POST | LAYER, ("fail", "fail", "5.76")),
        Row("Xavier PreNorm", XAVIER | PRE | LAYER, ("28.52", "28.73", "28.32")),
        Row("SmallInit PostNorm", SMALL | POST | LAYER, ("28.17", "28.20", "28.62")),
        Row("SmallInit PreNorm", SMALL | PRE | LAYER, ("28.26", "28.44", "28.33")),
    ),
)

TABLE3 = Study(
    id="tears.table3",
    seeds=3,
    title="BLEU on the tests of five low-resource pairs by placement and norm",
    claim="PreNorm, FixNorm and ScaleNorm each add at least 0.3 BLEU on average, 1.1 together.",
    columns=_pairs("bleu"),
    rows=(
        Row("PostNorm + LN, published", None, ("16.2", "24.0", "29.09", "23.66", "27.84")),
        Row("PostNorm + LN", SMALL | POST | LAYER | PLAIN, ("18.47", "29.37", "31.94", "27.85", "33.39")),
        Row("PreNorm + LN", SMALL | PRE | LAYER | PLAIN, ("19.09", "29.45", "31.92", "28.13", "33.79")),
        Row("PreNorm + FixNorm + LN", SMALL | PRE | LAYER | FIX, ("19.38", "29.50", "32.45", "28.39", "34.35†")),
        Row(
            "PreNorm + FixNorm + ScaleNorm",
            SMALL | PRE | SCALE | FIX,
            ("20.91‡*", "30.25‡*", "32.79*", "28.44*", "34.15*"),
        ),
    ),
)

BEST = SMALL | PRE | SCALE | FIX

TABLE4 = Study(
    id="tears.table4",
    title="BLEU on the development sets of PreNorm + FixNorm + ScaleNorm by learning rate schedule",
    claim="No warm-up is as good as any schedule, except on gl-en; twice the learning rate does no harm.",
    columns=_pairs("bleu valid"),
    rows=(
        Row("NoWarmup", BEST | NO_WARMUP, ("18.00", "28.92", "28.91", "30.33", "35.40"), at=RATE),
        Row("InvSqrtDecay", BEST, ("22.18", "29.08", "28.84", "30.30", "35.33")),
        Row("ValDecay", BEST | DECAY, ("21.45", "29.46", "28.67", "30.69", "35.46")),
        Row("InvSqrtDecay + 2xLR", BEST | TWICE, ("21.92", "29.03", "28.76", "30.50", "35.33")),
        Row("ValDecay + 2xLR", BEST | DECAY | TWICE, ("21.63", "29.49", "28.46", "30.13", "34.95")),
    ),
)

TABLE5 = Study(
    id="tears.table5",
    title="BLEU on the development set of en-vi without warm-up, by layers of encoder and decoder",
    claim="Without warm-up PostNorm fails at 5 and 6 layers, PreNorm at none.",
    columns=tuple(_valid(f"{depth} layers", {"model.depth": depth}, FEWER) for depth in (4, 5, 6)),
    rows=(
        Row("PostNorm", SMALL | POST | LAYER | NO_WARMUP, ("18.31", "fails", "fails"), at=RATE),
        Row("PreNorm", SMALL | PRE | LAYER | NO_WARMUP, ("28.33", "28.13", "28.32"), at=RATE),
    ),
)

TABLE6 = Study(
    id="tears.table6",
    title="BLEU of the base model on newstest2014, WMT14 En-De",
    claim="With much data PostNorm is above PreNorm, and ScaleNorm with FixNorm equals LayerNorm.",
    note="At pocket scale attention starts by SmallInit: with Xavier PostNorm learns hardly anything in 2,000 steps"
    " (`core.ted-gl`: 1.1 BLEU, with SmallInit 2.4).",
    columns=(Column("newstest2014", "bleu", WMT14_DE),),
    rows=(
        Row("PostNorm + LN, published", None, ("27.3",)),
        Row("PreNorm + LN", PRE | LAYER | PLAIN, ("26.83",)),
        Row("PreNorm + FixNorm + ScaleNorm", PRE | SCALE | FIX, ("27.07",)),
        Row("PostNorm + LN", POST | LAYER | PLAIN, ("27.58",)),
        Row("PostNorm + FixNorm + ScaleNorm", POST | SCALE | FIX, ("27.57",)),
    ),
)

TABLE7 = Study(
    id="tears.table7",
    title="BLEU on the tests of five pairs by how many scales g are learned (PreNorm)",
    claim="One g a norm is as good as one a channel; a fixed g needs a low learning rate.",
    columns=_pairs("bleu"),
    rows=(
        Row("RMSNorm + FixNorm", SMALL | PRE | RMS | FIX, ("20.92", "30.36", "32.54", "28.29", "33.67")),
        Row("ScaleNorm + FixNorm", BEST, ("20.91", "30.25", "32.79", "28.44", "34.15")),
        Row("ScaleNorm (g = √d) + FixNorm", BEST | FIXED_G, ("21.18", "30.36", "32.66", "28.19", "34.11")),
        Row(
            "ScaleNorm (g = √d) + FixNorm + ValDecay",
            BEST | FIXED_G | DECAY,
            ("20.36", "30.45", "32.83", "27.97", "33.98"),
        ),
        Row(
            "ScaleNorm (g = √d) + FixNorm + ValDecay + 2xLR",
            BEST | FIXED_G | DECAY | TWICE,
            ("21.15", "30.57", "31.81", "25.00", "28.92"),
        ),
    ),
)

TABLE8 = Study(
    id="tears.table8",
    title="perplexity with label smoothing on training data and test, LayerNorm and ScaleNorm (PreNorm)",
    claim="No clear trend: the test falls more than the training for gl-en and sk-en.",
    columns=tuple(
        Column(f"{norm} {part}", metric, settings=settings)
        for norm, settings in (("LN", LAYER), ("ScaleNorm", SCALE))
        for part, metric in (("train", "perplexity train"), ("test", "perplexity smoothed"))
    ),
    rows=tuple(
        Row(pair, SMALL | PRE | FIX, base=PAIRS[pair], printed=printed)
        for pair, printed in {
            "gl-en": ("11.792", "54.300", "10.151", "45.770"),
            "sk-en": ("14.078", "20.460", "14.004", "19.080"),
            "en-vi": ("15.961", "17.950", "16.719", "17.100"),
            "en-he": ("15.562", "14.950", "15.906", "15.080"),
            "ar-en": ("14.372", "13.450", "14.165", "13.290"),
        }.items()
    ),
)

COMPARED = (
    Row("PostNorm + LN", SMALL | POST | LAYER | PLAIN),
    Row("PreNorm + LN", SMALL | PRE | LAYER | PLAIN),
    Row("PreNorm + FixNorm + LN", SMALL | PRE | LAYER | FIX),
    Row("PreNorm + FixNorm + ScaleNorm", BEST),
    Row("PreNorm + FixNorm + ScaleNorm, NoWarmup", BEST | NO_WARMUP, at=RATE),
)

FIGURE1 = Study(
    id="tears.figure1",
    title="BLEU on the development set of en-vi during training",
    claim="PreNorm learns faster than PostNorm and stays above it; with ScaleNorm it ends highest.",
    columns=(_valid("best", {}),),
    rows=COMPARED,
)

FIGURE2 = Study(
    id="tears.figure2",
    title="norm of the whole gradient during training on en-vi",
    claim="PostNorm's gradients are noisy, with sharp spikes to the end; PreNorm's are smaller, even without warm-up.",
    columns=columns(IWSLT15_VI, {"median": "gradient_norm", "spikes": "gradient_norm outliers"}),
    rows=COMPARED,
)


def _by_depth(pair: str, base: Bases) -> tuple[Column, ...]:
    """The learned g of the decoder's first and second half of layers, at the end."""
    metrics = {"decoder, shallow": "g shallow", "decoder, deep": "g deep"}
    return tuple(Column(f"{pair}, {title}", metric, base, at={"pocket": DEEP}) for title, metric in metrics.items())


FIGURE3 = Study(
    id="tears.figure3",
    title="learned g of ScaleNorm by sublayer, pairs with 100k examples or more",
    claim="g grows with depth, but in decoder-encoder attention, and most clearly in the decoder; it is smaller in"
    " attention the more data there is.",
    seeds=3,
    columns=(*_by_depth("en-vi", IWSLT15_VI), *_by_depth("en-he", TED["he"]), *_by_depth("ar-en", TED["ar"])),
    rows=(Row("PreNorm + FixNorm + ScaleNorm", BEST),),
)

FIGURE4 = Study(
    id="tears.figure4",
    title="learned g of ScaleNorm with and without label smoothing, en-vi",
    claim="Without smoothing g is lower in the decoder's late layers, and far higher at the output.",
    seeds=3,
    columns=(
        Column("decoder, deep", "g deep", IWSLT15_VI, at={"pocket": DEEP}),
        Column("output", "g output", IWSLT15_VI, at={"pocket": DEEP}),
    ),
    rows=(Row("with label smoothing", BEST), Row("without label smoothing", BEST | {"label_smoothing": 0.0})),
)
