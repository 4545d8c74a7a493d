"""What the studies' columns start from: by corpus and model, then by scale.

A corpus that cannot be run at some scale has no entry there: its columns show the paper's figures and "not yet run".
"""

from typing import Any

from normkit.lab.studies.study import Base, Times

Bases = dict[str, Base]

CMUDICT: Bases = {"pocket": Base("cmudict", "g2p_cmudict", {"steps": 3600, "warmup": 360})}
MULTI30K: Bases = {
    "pocket": Base("multi30k.de-en", "mt_multi30k"),
    "gpu": Base("multi30k.de-en", "mt_multi30k", {"steps": 8000, "warmup": 800}),
}
MULTI30K_HOUR: Bases = {
    "pocket": Base("multi30k.de-en.hour", "mt_multi30k", {"steps": 10_000, "warmup": 1000, "valid_every": 2000}),
}

IWSLT14: Bases = {
    "pocket": Base("iwslt14.de-en", "mt_iwslt14_pocket"),
    "gpu": Base("iwslt14.de-en", "mt_iwslt14_gpu"),
    "paper": Base("iwslt14.de-en", "mt_iwslt14"),
}
IWSLT14_UN: Bases = {  # the script of Unified Normalization: run_iwslt14_train_un.sh
    "pocket": IWSLT14["pocket"],
    "gpu": Base("iwslt14.de-en.un", "mt_iwslt14_gpu", {"lr": 7e-4}),
    "paper": Base("iwslt14.de-en.un", "mt_iwslt14", {"lr": 7e-4, "warmup": 6000, "patience": 0}),
}
WMT14_DE_BIG: Bases = {"paper": Base("wmt14.en-de.big", "mt_wmt14_de")}
WMT14_DE: Bases = {  # Tears, Appendix C
    "paper": Base(
        "wmt14.en-de.base",
        "mt_wmt14_de",
        {
            "model.width": 512,
            "model.hidden": 2048,
            "model.heads": 8,
            "model.dropout": 0.1,
            "lr": 1e-3,
            "warmup": 4000,
            "clip": 1.0,
            "batch_tokens": 15_000,  # about 8192 of the longer side
            "accumulate": 10,
            "steps": 66_000,  # about 40 epochs
            "valid_every": 1650,
            "checkpoint_every": 1650,
            "patience": 0,
        },
    )
}
WMT14_FR: Bases = {"paper": Base("wmt14.en-fr.big", "mt_wmt14_fr")}


def _ted(language: str, epoch: int) -> Bases:
    """A pair of Tears' Table 1 but for the smallest: epochs of so many steps, 200 of them."""
    settings: dict[str, Any] = {
        "data": f"ted.{language}",
        "steps": 200 * epoch,
        "valid_every": epoch,
        "checkpoint_every": epoch,
    }
    return {"paper": Base(f"ted.{language}", "mt_iwslt15_vi", settings)}


IWSLT15_VI: Bases = {"paper": Base("iwslt15.en-vi", "mt_iwslt15_vi")}
TED: dict[str, Bases] = {
    "gl": {
        "pocket": Base("ted.gl", "mt_ted_gl_pocket", {"valid_bleu": True}),
        "gpu": Base("ted.gl", "mt_ted_gl", {"steps": 6000, "warmup": 2000, "lr": Times(2)}),
        "paper": Base("ted.gl", "mt_ted_gl"),
    },
    "sk": _ted("sk", 600),
    "he": _ted("he", 2000),
    "ar": _ted("ar", 2000),
}
PTB: Bases = {
    "pocket": Base("ptb", "lm_ptb_pocket"),
    "gpu": Base("ptb", "lm_ptb_core1"),  # the paper's setting is minutes of a GPU
    "paper": Base("ptb", "lm_ptb_core1"),
}
WIKITEXT2: Bases = {"pocket": Base("wikitext-2", "lm_wikitext2")}
WIKITEXT103: Bases = {"paper": Base("wikitext-103", "lm_wikitext103")}

CIFAR10: Bases = {
    "pocket": Base("cifar10", "cifar10_tiny_vit"),
    "gpu": Base("cifar10.t2t", "cifar10_t2t_vit_14_gpu"),
}
CIFAR10_SWIN: Bases = {"gpu": Base("cifar10.swin", "cifar10_swin_t_gpu")}
RESNET20: Bases = {
    "pocket": Base("cifar10.resnet20", "cifar10_resnet20"),
    "gpu": Base("cifar10.resnet20", "cifar10_resnet20_paper"),  # the paper's setting is minutes of a GPU
    "paper": Base("cifar10.resnet20", "cifar10_resnet20_paper"),
}
IMAGENET_T2T: Bases = {"paper": Base("imagenet.t2t", "imagenet_t2t_vit_14")}
IMAGENET_SWIN: Bases = {"paper": Base("imagenet.swin", "imagenet_swin_t")}
MASK_RCNN: Bases = {
    "pocket": Base("pennfudan.mask", "mask_rcnn_pennfudan"),
    "paper": Base("coco.mask", "mask_rcnn_coco_36"),
}
FASTER_RCNN: Bases = {
    "pocket": Base("pennfudan.faster", "mask_rcnn_pennfudan", {"model.arch": "faster_rcnn_pocket"}),
    "paper": Base("coco.faster", "faster_rcnn_coco_36"),
}
MASK_RCNN_12: Bases = {**MASK_RCNN, "paper": Base("coco.mask.12", "mask_rcnn_coco_12")}
FASTER_RCNN_12: Bases = {**FASTER_RCNN, "paper": Base("coco.faster.12", "faster_rcnn_coco_12")}
