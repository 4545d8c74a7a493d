"""PowerNorm (Shen et al., ICML 2020): Tables 1 to 4 and Figures 2 to 7, as printed."""

import dataclasses
from collections.abc import Sequence

from normkit_papers.bases import ADAPTIVE, CORE, IWSLT14, LSTM, MOS, PTB, RESNET20, WMT14_DE_BIG, XL, XL_LARGE
from normkit_papers.study import Bases, Column, Row, Settings, Study, Times, columns

ENCODER = {"model.norm_at": {"decoder.*": "layer"}}
NOTE = "In translation the decoder keeps LayerNorm (A.1); PN's layer-scale is before PN alone, in one group."

LN, BN, PNV, PN = ({"model.norm": norm} for norm in ("layer", "batch", "pnv", "power(groups=1)"))
BRN, MABN, GN = ({"model.norm": norm} for norm in ("renorm", "mabn", "group(groups=4)"))
POST = {**LN, "model.placement": "post"}
POST_NORM: dict[str, Settings] = {"pocket": {"lr": 5e-4, "warmup": 400}}  # at 2e-3 the loss stayed at 6.58 to step 320
LARGE_BATCHES: Settings = {"accumulate": Times(4), "steps": Times(1 / 4)}
SCALING_NMT: dict[str, Settings] = {  # Ott et al. 2018, section 3: 128 GPUs of 3,584 tokens, twice the learning rate
    "pocket": {**LARGE_BATCHES, "lr": 1e-3, "warmup": 100},
    "gpu": {**LARGE_BATCHES, "lr": Times(2), "warmup": Times(1 / 4)},
    "paper": {"batch_tokens": Times(3584 / 4096), "lr": 1e-3, "warmup": 4000},
}
FIXUP = {"model.init": "fixup", "model.norm": "nonorm(affine=True)", "model.norm_at": {}}  # nor any in the decoder


def _synchronized(norm: str) -> dict[str, Settings]:
    """Synchronize BN and PN-V of the big model over GPUs, as in A.1; IWSLT14 uses one GPU."""
    return {"paper": {"model.norm": f"{norm}(sync=True)"}}


TABLE1 = Study(
    id="pn.table1",
    seeds=3,
    title="BLEU of translation on the tests of IWSLT14 De-En and WMT14 En-De",
    claim="PN-V is far better than BN and does not reach LN; PN is above LN.",
    note=f"{NOTE} The first rows are of other papers, ours with this table's training and depth: LN after each block,"
    " with Fixup none; LayerDrop of 0.2, as in its paper. Dynamic Conv has its own depth on GPUs, 7 and 6 layers."
    " Scaling NMT has its own learning rate, warm-up and batches (459k tokens on WMT14); at the other scales four times"
    " the batch and twice the learning rate, for a fourth of the updates. At pocket scale LN after each block takes a"
    " learning rate of 5e-4: at 2e-3 its loss had not fallen by step 320. Pocket runs see less than a hundredth of the"
    " papers' tokens, with a model an eighth as large: they show that a row trains, not which is best at the end.",
    columns=(
        Column("IWSLT14 small", "bleu", IWSLT14, settings=ENCODER),
        Column("WMT14 big", "bleu", WMT14_DE_BIG, settings=ENCODER),
    ),
    rows=(
        Row("Transformer", POST, at=POST_NORM, printed=("34.4", "28.4")),
        Row("DS-Init", {**POST, "model.init": "ds"}, at=POST_NORM, printed=("34.4", "29.1")),
        Row("Fixup-Init", FIXUP, ("34.5", "29.3")),
        Row("Scaling NMT", POST, at=SCALING_NMT, printed=("/", "29.3")),
        Row(
            "Dynamic Conv",
            {**POST, "model.attention": "dynamicconv", "model.kernels": (3, 7, 15, 31)},
            at={**POST_NORM, **{scale: {"model.depth": 7, "model.decoder_depth": 6} for scale in ("gpu", "paper")}},
            printed=("35.2", "29.7"),
        ),
        Row("Transformer + LayerDrop", {**POST, "model.layer_drop": 0.2}, at=POST_NORM, printed=("/", "29.6")),
        Row("Pre-Norm LN", LN, ("35.5", "29.5")),
        Row("Pre-Norm BN", BN, at=_synchronized("batch"), printed=("34.4", "28.1")),
        Row("Pre-Norm PN-V", PNV, at=_synchronized("pnv"), printed=("35.5", "28.5")),
        Row("Pre-Norm PN", PN, ("35.9", "30.1")),
    ),
)

CORES2 = {"model.cores": 2}
LANGUAGE_MODELS = (
    "Each model is evaluated as in its paper: LSTMs and Transformer-XL carry their state over the whole test. "
    "Tensor-Transformer 1core, with LN, is one run of ours in two rows. At pocket scale all train on 256,000 words, "
    "of PTB (0.28 epochs) or WikiText-2."
)


def _both(bases: tuple[Bases, Bases]) -> tuple[Bases, ...]:
    """Repeat the base of each corpus for the columns of its validation and its test."""
    return tuple(base for base in bases for _ in range(2))


LANGUAGE_ROWS = (
    Row(label="Tied-LSTM", settings={}, base=_both(LSTM), printed=("75.7", "48.7", "-", "48.7")),
    Row(label="AWD-LSTM-MoS", settings={}, base=_both(MOS), printed=("58.1", "56.0", "29.0", "29.2")),
    Row(label="Adaptive Input", settings={}, base=_both(ADAPTIVE), printed=("59.1", "57.0", "19.8", "20.5")),
    Row(label="Transformer-XL base", settings={}, base=_both(XL), printed=("56.7", "54.5", "23.1", "24.0")),
    Row(label="Transformer-XL large", settings={}, base=_both(XL_LARGE), printed=("-", "-", "-", "18.3")),
    Row(label="Tensor-Transformer 1core", settings={}, printed=("55.4", "57.9", "23.6", "20.9")),
    Row(label="Tensor-Transformer 2core", settings=CORES2, printed=("54.3", "49.8", "19.7", "18.9")),
    Row(label="Tensor-Transformer 1core + LN", settings=LN, printed=("58.0*", "53.2*", "22.7*", "20.9*")),
    Row(label="Tensor-Transformer 1core + BN", settings=BN, printed=("71.7", "60.7", "28.4", "27.2")),
    Row(label="Tensor-Transformer 1core + PN-V", settings=PNV, printed=("59.7", "55.3", "23.6", "21.3")),
    Row(label="Tensor-Transformer 1core + PN", settings=PN, printed=("51.6", "47.6", "18.3", "17.9")),
)

TABLE2 = Study(
    id="pn.table2",
    seeds=3,
    title="perplexity of tensorized language models on the tests of PTB and WikiText-103",
    claim="PN is 5.6 and 3 points below LN; BN is the worst, PN-V between.",
    note=LANGUAGE_MODELS,
    columns=(Column("PTB", "perplexity", CORE[0]), Column("WikiText-103", "perplexity", CORE[1])),
    rows=tuple(  # of four columns, the odd ones are the tests
        dataclasses.replace(
            row, printed=row.printed[1::2], base=row.base[1::2] if isinstance(row.base, Sequence) else None
        )
        for row in LANGUAGE_ROWS
    ),
)

TABLE3 = Study(
    id="pn.table3",
    title="perplexity of tensorized language models on validation and test of PTB and WikiText-103",
    claim="Validation agrees with the test of Table 2.",
    note=LANGUAGE_MODELS,
    columns=(
        *columns(CORE[0], {"PTB valid": "perplexity valid", "PTB test": "perplexity"}),
        *columns(CORE[1], {"WikiText-103 valid": "perplexity valid", "WikiText-103 test": "perplexity"}),
    ),
    rows=LANGUAGE_ROWS,
)

TABLE4 = Study(
    id="pn.table4",
    seeds=3,
    title="further norms: BLEU on the test of IWSLT14 De-En, perplexity on the test of PTB",
    claim="BRN, MABN and PN-V are above BN and below LN; GN is the best of the earlier norms, PN of all.",
    note=f"{NOTE} GN has as many groups as IWSLT14's model has heads, in both columns.",
    columns=(Column("IWSLT14", "bleu", IWSLT14, settings=ENCODER), Column("PTB", "perplexity", PTB)),
    rows=(
        Row("BN", BN, ("34.4", "60.7")),
        Row("BRN", BRN, ("34.7", "58.3")),
        Row("MABN", MABN, ("34.9", "57.2")),
        Row("LN", LN, ("35.5", "53.2")),
        Row("GN", GN, ("35.7", "51.7")),
        Row("PN-V", PNV, ("35.5", "55.3")),
        Row("PN", PN, ("35.9", "47.6")),
    ),
)


def _statistics(*quantities: tuple[str, str]) -> tuple[Column, ...]:
    """The median of each quantity over the run, and how far its outliers stand out."""
    return tuple(
        Column(f"{title}{shown}", f"{quantity}{shown}", IWSLT14, settings=ENCODER)
        for title, quantity in quantities
        for shown in ("", " outliers")
    )


POCKET_RESNET = "At pocket scale ResNet20 gets images of 16 x 16 and trains with AdamW."
FIGURE2 = Study(
    id="pn.figure2",
    title="distance between batch and running mean and variance in the first BN during training",
    claim="ResNet20's distances are orders of magnitude smaller; the Transformer's have extreme outliers.",
    note=f"{NOTE} {POCKET_RESNET}",
    columns=_statistics(("mean", "distance_mean"), ("variance", "distance_var")),
    rows=(
        Row("ResNet20 on CIFAR-10", {**BN, "model.norm_at": {}}, base=RESNET20),
        Row("Transformer BN on IWSLT14", BN),
    ),
)

FIGURE3 = Study(
    id="pn.figure3",
    title="gradient that mean and variance contribute to the input of the first BN during training",
    claim="The Transformer's vary by orders of magnitude more, and their outliers persist to the end.",
    note=f"{NOTE} {POCKET_RESNET}",
    columns=_statistics(("g_mu", "g_mu"), ("g_sigma2", "g_sigma2")),
    rows=FIGURE2.rows,
)

FIGURE4 = Study(
    id="pn.figure4",
    title="statistics and gradients of the first BN (variance) and PN-V (quadratic mean) during training",
    claim="The quadratic mean moves far less than the variance, and its gradient has far fewer outliers.",
    note=NOTE,
    columns=_statistics(
        ("variance", "distance_var"),
        ("quadratic mean", "distance_quadratic"),
        ("g_sigma2", "g_sigma2"),
        ("g_psi2", "g_psi2"),
    ),
    rows=(Row("BN", BN), Row("PN-V", PNV)),
)

FIGURE5 = Study(
    id="pn.figure5",
    title="BLEU on the test of IWSLT14 De-En by tokens a batch, at 4k tokens an update",
    claim="PN is above LN at every size; PN-V reaches LN at 4k alone; BN is poor and has no trend.",
    note=NOTE,
    columns=tuple(
        Column(
            title, "bleu", IWSLT14, settings={**ENCODER, "batch_tokens": Times(1 / parts), "accumulate": Times(parts)}
        )
        for title, parts in (("512", 8), ("1k", 4), ("2k", 2), ("4k", 1))
    ),
    rows=(Row("PN", PN), Row("LN", LN), Row("PN-V", PNV), Row("BN", BN)),
)

FIGURE6 = Study(
    id="pn.figure6",
    title="singular values of the word embedding after training on WMT14, the largest being 1",
    claim="PN's singular values fall more slowly than LN's.",
    note=NOTE,
    columns=(
        Column("WMT14", "singular value", WMT14_DE_BIG, settings=ENCODER),
        Column("IWSLT14", "singular value", IWSLT14, settings=ENCODER),
    ),
    rows=(Row("PN", PN), Row("LN", LN)),
)

FIGURE7 = Study(
    id="pn.figure7",
    title="ratio of gamma to the quadratic mean of the batch in the layers of PN-V, on IWSLT14",
    claim="The ratio is at most 1 in every channel of every layer, so that Lemma 2 holds.",
    note=NOTE,
    columns=(
        Column("largest ratio", "gamma_over_psi_max anywhere", IWSLT14, settings=ENCODER),
        Column("Lemma 2", "lipschitz anywhere", IWSLT14, settings=ENCODER),
    ),
    rows=(Row("PN-V", PNV),),
)
