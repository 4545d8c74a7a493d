"""Unified Normalization (Yang et al., 2022): Tables 1 to 10, Figures 1 and 3 to 6."""

from normkit_papers import bases
from normkit_papers.study import Bases, Column, Row, Settings, Study, columns, with_options

PAPER_WARMUP = 4000  # of UN's statistics, where the learning rate warms up over 6000


def _norm(spec: str) -> Settings:
    return {"model.norm": spec}


def _un(label: str, printed: tuple[str, ...] = (), **options: object) -> Row:
    """A row of UN; at paper scale with the warm-up that the authors' script gives it."""
    spec = f"un({', '.join(f'{key}={value!r}' for key, value in {'window': 4, **options}.items())})"
    at = {"paper": _norm(with_options(spec, {"warmup": PAPER_WARMUP}))}
    return Row(label, _norm(spec), at=at, printed=printed)


LN, RMS, NONORM, BN, MABN = map(_norm, ("layer", "rms", "nonorm", "batch", "mabn"))
PN, PN_STAR = _norm("power(groups=1)"), _norm("power(groups=0)")

TABLE1 = Study(
    id="un.table1",
    seeds=3,
    title="BLEU of translation on the tests of IWSLT14 De-En and WMT14 En-Fr",
    claim="UN equals LN and is the best of the norms that fold; BN loses 4 to 5 points.",
    columns=(Column("IWSLT14", "bleu", bases.IWSLT14_UN), Column("WMT14 En-Fr", "bleu", bases.WMT14_FR)),
    rows=(
        Row("LN", LN, ("35.3", "40.0")),
        Row("RMSNorm", RMS, ("35.3", "39.8")),
        Row("PN", PN, ("35.3", "39.8")),
        Row("NoNorm", NONORM, ("FAIL", "32.8")),
        Row("BN, folds", BN, ("31.1", "35.1")),
        Row("MABN, folds", MABN, ("35.4", "36.5")),
        Row("PN*, folds", PN_STAR, ("35.0", "39.7")),
        _un("UN, folds", ("35.4", "39.9")),
    ),
)


POCKET_VIT = (
    "At pocket scale T2T-ViT-14 on CIFAR-10 is a tiny ViT; there and at gpu scale it is trained from scratch. The paper"
    " fine-tunes ImageNet weights, as `papers train cifar10_t2t_vit_14_tuned --weights RUN` does."
)
POCKET_COCO = (
    "At pocket scale COCO is Penn-Fudan, 120 street scenes to train on, and Swin-T a narrow Swin. Backbones start from"
    " random weights; the paper's from ImageNet weights with the same norm, as `papers train --weights` does."
)


def _detection(base: Bases, *kinds: str) -> tuple[Column, ...]:
    names = [f"{kind} AP{at}" for kind in kinds for at in ("", "50", "75", "s", "m", "l")]
    return columns(base, dict(zip(names, names, strict=True)))


FILTERED = {"outlier_filtration": True}  # the paper filters in images, and not in text


def _figures(line: str) -> tuple[str, ...]:
    return tuple(line.split())


TABLE2 = Study(
    id="un.table2",
    seeds=3,
    title="accuracy in percent of Swin-T and T2T-ViT-14 on ImageNet-1K, of T2T-ViT-14 on CIFAR-10 and CIFAR-100",
    claim="UN is the best of the norms that fold; MABN and PN* fail on T2T-ViT-14.",
    note=POCKET_VIT,
    columns=(
        Column("Swin-T ImageNet", "accuracy", bases.IMAGENET_SWIN),
        Column("T2T-ViT-14 ImageNet", "accuracy", bases.IMAGENET_T2T),
        Column("T2T-ViT-14 CIFAR10", "accuracy", bases.CIFAR10),
        Column("T2T-ViT-14 CIFAR100", "accuracy", bases.CIFAR100),
    ),
    rows=(
        Row("LN", LN, ("81.3", "81.5", "98.3", "88.4")),
        Row("BN, folds", BN, ("80.8", "79.8", "96.6", "88.2")),
        Row("MABN, folds", MABN, ("80.9", "FAIL", "/", "/")),
        Row("PN*, folds", PN_STAR, ("80.9", "FAIL", "/", "/")),
        _un("UN, folds", ("81.0", "80.9", "98.3", "88.9"), **FILTERED),
    ),
)

TABLE3 = Study(
    id="un.table3",
    title="average precision of Faster R-CNN with Swin-T on COCO val2017 after 36 epochs",
    claim="UN is 0.3 below LN and above all other norms that fold.",
    note=POCKET_COCO,
    columns=_detection(bases.FASTER_RCNN, "box"),
    rows=(
        Row("LN", LN, ("45.5", "67.5", "50.2", "31.5", "48.8", "58.4")),
        Row("BN, folds", BN, ("44.6", "66.8", "48.9", "30.4", "48.0", "57.8")),
        Row("MABN, folds", MABN, ("44.8", "66.8", "49.0", "29.0", "47.9", "57.3")),
        Row("PN*, folds", PN_STAR, ("44.3", "66.7", "48.4", "29.6", "47.4", "57.2")),
        _un("UN, folds", ("45.2", "67.2", "49.7", "30.1", "48.4", "58.2"), **FILTERED),
    ),
)

TABLE4 = Study(
    id="un.table4",
    title="average precision of Mask R-CNN with Swin-T on COCO val2017 after 36 epochs, boxes and masks",
    claim="UN is close to LN, for boxes and for masks.",
    note=POCKET_COCO,
    columns=_detection(bases.MASK_RCNN, "box", "mask"),
    rows=(
        Row("LN", LN, _figures("46.0 68.1 50.3 31.2 49.2 60.1 41.6 65.1 44.9 25.9 45.1 56.9")),
        Row("BN, folds", BN, _figures("44.9 67.2 49.0 29.6 48.4 58.3 40.8 64.0 43.8 24.9 44.4 55.3")),
        Row("MABN, folds", MABN, _figures("45.1 67.2 49.6 30.0 48.3 57.7 41.0 64.2 44.1 24.9 44.7 55.0")),
        Row("PN*, folds", PN_STAR, _figures("44.6 66.8 48.9 29.1 47.6 57.6 40.7 63.7 43.6 24.1 43.8 54.9")),
        _un("UN, folds", _figures("45.6 67.6 50.4 29.6 49.2 58.9 41.4 64.8 44.5 25.2 45.1 55.7"), **FILTERED),
    ),
)

PARTS = (
    "GM: geometric mean forward; AM, alpha: arithmetic mean and momentum backward. Without both the backward removes"
    " the batch's own statistics."
)


def _ablation(*printed: str, **options: object) -> tuple[Row, ...]:
    """Rows of UN without some of its parts."""
    parts: dict[str, dict[str, object]] = {
        "1: GM, AM, alpha": {},
        "2: AM, alpha": {"window": 1, "window_bkw": 4},
        "3: GM, alpha": {"window_bkw": 1},
        "4: GM, AM": {"alpha_bkw": 0.0},
        "5: GM": {"window_bkw": 1, "alpha_bkw": 0.0},
    }
    rows = zip(parts.items(), printed, strict=True)
    return tuple(_un(label, _figures(line), **part, **options) for (label, part), line in rows)


TABLE5 = Study(
    id="un.table5",
    title="parts of UN left out, average precision of Mask R-CNN with Swin-T on COCO val2017 after 12 epochs",
    claim="Each part adds something.",
    note=f"{PARTS} {POCKET_COCO}",
    columns=columns(bases.MASK_RCNN_12, {"box AP": "box AP", "mask AP": "mask AP"}),
    rows=_ablation("42.8 39.2", "42.2 38.8", "42.4 38.8", "42.4 39.0", "42.5 39.0", **FILTERED),
)

TABLE6 = Study(
    id="un.table6",
    title="UN's window M, average precision of Mask R-CNN with Swin-T on COCO val2017 after 12 epochs (transposed)",
    claim="Any moderate window does.",
    note=POCKET_COCO,
    columns=TABLE5.columns,
    rows=tuple(
        _un(f"M = {window}", _figures(printed), window=window, **FILTERED)
        for window, printed in (
            (2, "42.8 39.2"),
            (4, "42.8 39.3"),
            (6, "42.8 39.1"),
            (8, "42.8 39.2"),
            (10, "42.5 39.2"),
        )
    ),
)

TABLE7 = Study(
    id="un.table7",
    title="UN with and without outlier filtration on ImageNet (accuracy) and COCO val2017 (average precision)",
    claim="Without filtration training fails, except for Swin-T on ImageNet.",
    note=POCKET_COCO,
    columns=(
        Column("T2T-ViT-14 ImageNet", "accuracy", bases.IMAGENET_T2T),
        Column("Swin-T ImageNet", "accuracy", bases.IMAGENET_SWIN),
        Column("Faster RCNN box AP", "box AP", bases.FASTER_RCNN_12),
        Column("Mask RCNN box AP", "box AP", bases.MASK_RCNN_12),
        Column("Mask RCNN mask AP", "mask AP", bases.MASK_RCNN_12),
    ),
    rows=(
        _un("with", ("80.9", "81.0", "42.2", "42.8", "39.2"), **FILTERED),
        _un("without", ("FAIL", "80.7", "FAIL", "FAIL", "FAIL")),
    ),
)

TABLE8 = Study(
    id="un.table8",
    title="memory (MB) and throughput (images a second) of Swin-T at inference, LN against UN folded, RTX 3090",
    claim="Folding saves 17.7% of the memory and adds 31.2% to the throughput on ImageNet, 6.1% and 24.2% on COCO.",
    note="All variants in one run, memory on GPUs alone. Shown are eager models in float32.",
    script="python benchmarks/deploy.py --models swin --runtimes eager --schemes float32",
    columns=tuple(
        Column(f"{task} {title}", metric)
        for task in ("ImageNet", "COCO")
        for title, metric in (("MEM", "memory"), ("TPUT", "speed"))
    ),
    rows=(Row("LN", LN, ("9978", "1179.5", "955", "17.8")), _un("UN", ("8213", "1547.8", "897", "22.1"), **FILTERED)),
)

TABLE9 = Study(
    id="un.table9",
    seeds=3,
    title="parts of UN left out, BLEU on the test of IWSLT14 De-En",
    claim="Without momentum in the backward training breaks down; the geometric mean is worth 0.9.",
    note=PARTS,
    columns=(Column("IWSLT14", "bleu", bases.IWSLT14_UN),),
    rows=_ablation("35.4", "34.5", "35.3", "18.3", "FAIL"),
)

TABLE10 = Study(
    id="un.table10",
    title="UN's alpha, average precision on COCO val2017 and BLEU on the test of IWSLT14 De-En (transposed)",
    claim="COCO does not mind; translation fails at 0.6.",
    note=POCKET_COCO,
    columns=(
        Column("box AP", "box AP", bases.MASK_RCNN_12, options=FILTERED),
        Column("mask AP", "mask AP", bases.MASK_RCNN_12, options=FILTERED),
        Column("IWSLT14 BLEU", "bleu", bases.IWSLT14_UN),
    ),
    rows=tuple(
        _un(f"alpha = {alpha}", _figures(printed), alpha=alpha)
        for alpha, printed in (
            (0.9, "42.8 39.2 35.4"),
            (0.8, "42.6 39.1 35.4"),
            (0.7, "42.7 39.2 35.3"),
            (0.6, "42.8 39.4 FAIL"),
        )
    ),
)

FIGURE1 = Study(
    id="un.figure1",
    title="training of Transformer (IWSLT14), T2T-ViT-14 (ImageNet) and Swin-T (COCO) by norm",
    claim="Other norms that fold learn less well or crash; UN follows LN.",
    note=f"{POCKET_VIT} {POCKET_COCO}",
    columns=(
        Column("IWSLT14, valid perplexity", "perplexity valid", bases.IWSLT14_UN),
        Column("T2T-ViT-14", "accuracy", {**bases.CIFAR10, **bases.IMAGENET_T2T}, options=FILTERED),
        Column("Swin-T", "box AP", bases.MASK_RCNN, options=FILTERED),
    ),
    rows=(Row("LN", LN), Row("BN", BN), Row("MABN", MABN), Row("PN*", PN_STAR), _un("UN")),
)

FIGURE3 = Study(
    id="un.figure3",
    title="PNAC, channels whose statistics look normal over iterations, of activations and gradients",
    claim="Activations lose normality in the course of training, gradients hardly.",
    columns=columns(bases.IWSLT14_UN, {"activations": "pnac_activation", "gradients": "pnac_gradient"}),
    rows=(Row("MABN", MABN), _un("UN")),
)

FIGURE4 = Study(
    id="un.figure4",
    title="statistics of a channel over iterations, geometric and arithmetic mean over the window",
    claim="The range of activation statistics grows with depth and training; outliers pull the arithmetic mean, not the"
    " geometric.",
    columns=columns(
        bases.IWSLT14_UN,
        {
            "activation, largest / median": "channel_activation outliers",
            "its arithmetic mean": "channel_activation_am outliers",
            "its geometric mean": "channel_activation_gm outliers",
        },
    ),
    rows=(_un("UN"),),
)

FIGURE5 = Study(
    id="un.figure5",
    title="steps that outlier filtration drops, by depth, after 12, 24 and 36 epochs on COCO",
    claim="Outliers come from deeper layers, and more of them as training goes on.",
    seeds=3,
    columns=tuple(
        Column(f"{model}, {part}", f"filtered {part}", base)
        for model, base in (("Swin-T", bases.MASK_RCNN), ("IWSLT14", bases.IWSLT14_UN))
        for part in ("shallow", "deep", "early", "late")
    ),
    rows=(_un("UN", outlier_filtration=True),),
)

FIGURE6 = Study(
    id="un.figure6",
    title="similarity (CKA) of T2T-ViT-14's feature maps with those of the model with LN",
    claim="UN's features are closer to LN's than BN's are, most of all in shallow layers.",
    note="CKA on 1,000 test images, of norms, attention and feed-forward blocks. `papers report --figure un.figure6`"
    " draws the maps. At pocket scale the model reads 4 tokens of CIFAR-10 for 0.7 epochs, which is"
    " no evidence on the similarity after 310 epochs on ImageNet.",
    columns=columns(
        bases.T2T, {"all layers": "cka", "first third of the layers": "cka shallow", "accuracy": "accuracy"}
    ),
    rows=(Row("LN", LN), Row("BN", BN), _un("UN", outlier_filtration=True)),
)
