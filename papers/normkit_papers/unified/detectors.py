"""Recipes of Unified Normalization's detectors; `model.norm` is that of the backbone."""

import dataclasses

from normkit_papers.models.config import Model
from normkit_papers.study import Base, Bases
from normkit_papers.train.config import DetectionRun, Run

EPOCH = 117_266 // 16  # steps: COCO's training images that have boxes


def mask_rcnn_coco_36() -> Run:
    """Mask R-CNN with Swin-T on COCO, 36 epochs, as in Unified Normalization (B.3).

    NORMKIT_DATA=FOLDER papers train mask_rcnn_coco_36 --devices 8 --batch-tokens 2 --weights RUN --model.norm un

    Cost: 8 GPUs. The paper's AP of boxes / masks: layer 46.0 / 41.6, un 45.6 / 41.4, batch 44.9 / 40.8,
    mabn 45.1 / 41.0, power(groups=0) 44.6 / 40.7.

    `RUN` is a classifier's run, or torchvision's Swin-T, with the same norms. The paper's norm is
    `un(outlier_filtration=True)`.
    """
    return DetectionRun(
        name="mask_rcnn_coco_36", data="coco",
        model=Model(arch="mask_rcnn_swin_t", layer_drop=0.2),
        steps=36 * EPOCH, batch_tokens=16, workers=8,
        lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05, clip=0.0,
        schedule="steps", milestones=(27 * EPOCH, 33 * EPOCH), warmup=500, warmup_start=1e-7,
        valid_every=EPOCH, checkpoint_every=EPOCH, keep=2,
        precision="bf16-mixed", record_every=500, test_items=0,
    )  # fmt: skip


def mask_rcnn_coco_12() -> Run:
    """Mask R-CNN with Swin-T on COCO, 12 epochs, as in the paper's ablations.

    NORMKIT_DATA=FOLDER papers train mask_rcnn_coco_12 --devices 8 --batch-tokens 2 --weights RUN --model.norm un

    Cost: 8 GPUs. The paper's AP of boxes / masks: un 42.8 / 39.2.
    """
    return dataclasses.replace(
        mask_rcnn_coco_36(), name="mask_rcnn_coco_12", steps=12 * EPOCH, milestones=(8 * EPOCH, 11 * EPOCH)
    )


def faster_rcnn_coco_36() -> Run:
    """Faster R-CNN with Swin-T on COCO, 36 epochs, as in Unified Normalization (Table 3).

    NORMKIT_DATA=FOLDER papers train faster_rcnn_coco_36 --devices 8 --batch-tokens 2 --weights RUN

    Cost: 8 GPUs. The paper's AP of boxes: layer 45.5, un 45.2, batch 44.6, mabn 44.8, power(groups=0) 44.3.
    """
    whole = mask_rcnn_coco_36()
    model = dataclasses.replace(whole.model, arch="faster_rcnn_swin_t")
    return dataclasses.replace(whole, name="faster_rcnn_coco_36", model=model)


def faster_rcnn_coco_12() -> Run:
    """Faster R-CNN with Swin-T on COCO, 12 epochs.

    NORMKIT_DATA=FOLDER papers train faster_rcnn_coco_12 --devices 8 --batch-tokens 2 --weights RUN

    Cost: 8 GPUs.
    """
    short = mask_rcnn_coco_12()
    model = dataclasses.replace(short.model, arch="faster_rcnn_swin_t")
    return dataclasses.replace(short, name="faster_rcnn_coco_12", model=model)


def mask_rcnn_pennfudan() -> Run:
    """Mask R-CNN with a narrow Swin on Penn-Fudan: 120 street scenes, one object class.

    NORMKIT_DATA=FOLDER papers train mask_rcnn_pennfudan --model.norm 'un(warmup=40, outlier_filtration=True)'

    Cost: minutes on one CPU core.
    """
    return DetectionRun(
        name="mask_rcnn_pennfudan", data="pennfudan_320",
        model=Model(arch="mask_rcnn_pocket"),
        steps=400, batch_tokens=4, threads=1,
        lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, clip=5.0,
        warmup=40,
        valid_every=200, checkpoint_every=200, keep=1,
        record_every=50, test_items=0,
    )  # fmt: skip


def mask_rcnn_coco128() -> Run:
    """Mask R-CNN with a narrow Swin on 128 COCO images, scored on the same images.

    NORMKIT_DATA=FOLDER papers train mask_rcnn_coco128 --model.norm 'un(warmup=40, outlier_filtration=True)'

    Cost: minutes on one CPU core. Checks that the detector can fit its training data, nothing more.
    """
    return dataclasses.replace(mask_rcnn_pennfudan(), name="mask_rcnn_coco128", data="coco128_320")


MASK_RCNN: Bases = {
    "pocket": Base("pennfudan.mask", mask_rcnn_pennfudan),
    "paper": Base("coco.mask", mask_rcnn_coco_36),
}
FASTER_RCNN: Bases = {
    "pocket": Base("pennfudan.faster", mask_rcnn_pennfudan, {"model.arch": "faster_rcnn_pocket"}),
    "paper": Base("coco.faster", faster_rcnn_coco_36),
}
MASK_RCNN_12: Bases = {**MASK_RCNN, "paper": Base("coco.mask.12", mask_rcnn_coco_12)}
FASTER_RCNN_12: Bases = {**FASTER_RCNN, "paper": Base("coco.faster.12", faster_rcnn_coco_12)}
