"""Starting points of the studies' runs: a recipe for each scale, and the folder of its runs."""

from typing import Any

from normkit_papers.recipes import RECIPES
from normkit_papers.study import Base, Bases, Settings, Times


def _bases(**scales: tuple[Any, ...]) -> Bases:
    """Bases by scale: folder, recipe, and settings that replace the recipe's."""
    return {scale: Base(folder, RECIPES[recipe], *changes) for scale, (folder, recipe, *changes) in scales.items()}


# -- our own ----------------------------------------------------------------------------------------------------------

CMUDICT = _bases(pocket=("cmudict", "g2p_cmudict", {"steps": 3600, "warmup": 360}))
MULTI30K = _bases(
    pocket=("multi30k.de-en", "mt_multi30k"), gpu=("multi30k.de-en", "mt_multi30k", {"steps": 8000, "warmup": 800})
)
MULTI30K_HOUR = _bases(
    pocket=("multi30k.de-en.hour", "mt_multi30k", {"steps": 10_000, "warmup": 1000, "valid_every": 2000})
)
WIKITEXT2 = _bases(pocket=("wikitext-2", "lm_wikitext2"))
ROTARY = _bases(pocket=("pydoc.rotary", "lm_rotary"))

# -- PowerNorm --------------------------------------------------------------------------------------------------------

IWSLT14 = _bases(
    pocket=("iwslt14.de-en", "mt_iwslt14_pocket"),
    gpu=("iwslt14.de-en", "mt_iwslt14_gpu"),
    paper=("iwslt14.de-en", "mt_iwslt14"),
)
IWSLT14_LONG = _bases(
    pocket=("iwslt14.de-en.long", "mt_iwslt14_pocket", {"steps": 5000, "warmup": 500, "valid_every": 1000})
)
WMT14_DE_BIG = _bases(paper=("wmt14.en-de.big", "mt_wmt14_de"))
PTB = _bases(
    pocket=("ptb", "lm_ptb_pocket"),
    gpu=("ptb", "lm_ptb_core1"),  # the paper's setting is minutes of a GPU
    paper=("ptb", "lm_ptb_core1"),
)
PTB_SHORT = _bases(pocket=("ptb.short", "lm_ptb_pocket", {"steps": 1000, "warmup": 100, "valid_every": 500}))
RESNET20 = _bases(
    pocket=("cifar10.resnet20", "cifar10_resnet20"),
    gpu=("cifar10.resnet20", "cifar10_resnet20_paper"),  # the paper's setting is minutes of a GPU
    paper=("cifar10.resnet20", "cifar10_resnet20_paper"),
)
_HOUR: Settings = {  # 20 epochs
    "images.held_out": 2000, "steps": 7500, "schedule": "cosine", "warmup": 375, "workers": 0, "threads": 1,
    "valid_every": 1875, "checkpoint_every": 375, "record_every": 25,
}  # fmt: skip
RESNET20_HOUR = _bases(pocket=("cifar10.resnet20.hour", "cifar10_resnet20_paper", _HOUR))


def _language_models(model: str, brief: str, ptb: str, wikitext103: str) -> tuple[Bases, Bases]:
    """Bases of a model on PTB and on WikiText-103, in whose place pocket runs have WikiText-2."""
    small, large = f"ptb.{model}", (f"wikitext-103.{model}", wikitext103)
    paper = {"gpu": (small, ptb), "paper": (small, ptb)} if ptb else {}  # the tables print no figure for XL large
    return (
        _bases(pocket=(small, brief), **paper),
        _bases(pocket=(f"wikitext-2.{model}", brief, {"data": "wikitext-2"}), paper=large),
    )


LSTM = _language_models("lstm", "lm_ptb_lstm_brief", "lm_ptb_lstm", "lm_wikitext103_lstm")
MOS = _language_models("mos", "lm_ptb_mos_brief", "lm_ptb_mos", "lm_wikitext103_mos")
ADAPTIVE = _language_models("adaptive", "lm_ptb_adaptive_brief", "lm_ptb_adaptive", "lm_wikitext103_adaptive")
XL = _language_models("xl", "lm_ptb_xl_brief", "lm_ptb_xl", "lm_wikitext103_xl")
XL_LARGE = _language_models("xl-large", "lm_ptb_xl_large_brief", "", "lm_wikitext103_xl_large")
CORE: tuple[Bases, Bases] = (
    {**PTB, **_bases(pocket=("ptb.core", "lm_ptb_core1_brief"))},
    _bases(
        pocket=("wikitext-2.core", "lm_ptb_core1_brief", {"data": "wikitext-2"}),
        paper=("wikitext-103", "lm_wikitext103"),
    ),
)

# -- Transformers without Tears ---------------------------------------------------------------------------------------


def _low_resource(data: str, paper: tuple[Any, ...], valid_bleu: bool = True) -> Bases:
    """Bases of a pair; pocket runs have other `data`, 1,000 test pairs, and a curve on the validation split."""
    settings = {"data": data, "valid_bleu": valid_bleu, "valid_every": 250, "checkpoint_every": 250, "test_items": 1000}
    return _bases(pocket=(data, "mt_ted_gl_pocket", settings), paper=paper)


def _ted(language: str, epoch: int, data: str) -> Bases:
    """Bases of a larger pair of the paper's Table 1: 200 epochs of `epoch` steps."""
    settings = {"data": f"ted.{language}", "steps": 200 * epoch, "valid_every": epoch, "checkpoint_every": epoch}
    return _low_resource(data, (f"ted.{language}", "mt_iwslt15_vi", settings))


_BASE_MODEL: Settings = {  # Appendix C; batches of about 8192 tokens of the longer side, about 40 epochs
    "model.width": 512, "model.hidden": 2048, "model.heads": 8, "model.dropout": 0.1, "lr": 1e-3, "warmup": 4000,
    "clip": 1.0, "batch_tokens": 15_000, "accumulate": 10, "steps": 66_000, "valid_every": 1650,
    "checkpoint_every": 1650, "patience": 0,
}  # fmt: skip
WMT14_DE = _low_resource("tatoeba.de-en", ("wmt14.en-de.base", "mt_wmt14_de", _BASE_MODEL), valid_bleu=False)
IWSLT15_VI = _low_resource("iwslt15.en-vi", ("iwslt15.en-vi", "mt_iwslt15_vi"))
TED: dict[str, Bases] = {
    "gl": _bases(
        pocket=("ted.gl", "mt_ted_gl_pocket", {"valid_bleu": True}),
        gpu=("ted.gl", "mt_ted_gl", {"steps": 6000, "warmup": 2000, "lr": Times(2)}),
        paper=("ted.gl", "mt_ted_gl"),
    ),
    "sk": _ted("sk", 600, "debian.sk-en"),
    "he": _ted("he", 2000, "ted.az"),
    "ar": _ted("ar", 2000, "tatoeba.ar-en"),
}
_DROPOUT = dict.fromkeys(("model.dropout", "model.attention_dropout", "model.hidden_dropout"), 0.3)
TED_LONG = _bases(pocket=("ted.gl.long", "mt_ted_gl_pocket", {**_DROPOUT, "steps": 10_000, "warmup": 1000}))

# -- Unified Normalization --------------------------------------------------------------------------------------------

IWSLT14_UN = _bases(  # run_iwslt14_train_un.sh of the authors
    pocket=("iwslt14.de-en", "mt_iwslt14_pocket"),
    gpu=("iwslt14.de-en.un", "mt_iwslt14_gpu", {"lr": 7e-4}),
    paper=("iwslt14.de-en.un", "mt_iwslt14", {"lr": 7e-4, "warmup": 6000, "patience": 0}),
)
WMT14_FR = _bases(paper=("wmt14.en-fr.big", "mt_wmt14_fr"))
CIFAR10 = _bases(pocket=("cifar10", "cifar10_tiny_vit"), gpu=("cifar10.t2t", "cifar10_t2t_vit_14_gpu"))
CIFAR100 = _bases(gpu=("cifar100.t2t", "cifar10_t2t_vit_14_gpu", {"data": "cifar100"}))
CIFAR10_SWIN = _bases(gpu=("cifar10.swin", "cifar10_swin_t_gpu"))
IMAGENET_T2T = _bases(paper=("imagenet.t2t", "imagenet_t2t_vit_14"))
T2T: Bases = {**CIFAR10, **_bases(pocket=("cifar10.t2t", "cifar10_t2t_vit_14_pocket")), **IMAGENET_T2T}
IMAGENET_SWIN = _bases(paper=("imagenet.swin", "imagenet_swin_t"))
_FASTER = {"model.arch": "faster_rcnn_pocket"}
_MASK_POCKET, _FASTER_POCKET = (
    ("pennfudan.mask", "mask_rcnn_pennfudan"), ("pennfudan.faster", "mask_rcnn_pennfudan", _FASTER),
)  # fmt: skip
MASK_RCNN = _bases(pocket=_MASK_POCKET, paper=("coco.mask", "mask_rcnn_coco_36"))
MASK_RCNN_12 = _bases(pocket=_MASK_POCKET, paper=("coco.mask.12", "mask_rcnn_coco_12"))
FASTER_RCNN = _bases(pocket=_FASTER_POCKET, paper=("coco.faster", "faster_rcnn_coco_36"))
FASTER_RCNN_12 = _bases(pocket=_FASTER_POCKET, paper=("coco.faster.12", "faster_rcnn_coco_12"))
