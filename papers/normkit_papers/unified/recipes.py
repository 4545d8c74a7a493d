"""Recipes of Unified Normalization (Yang et al., 2022): translation and classification."""

import dataclasses

from normkit_papers.models.config import Model
from normkit_papers.powernorm.recipes import IWSLT14, mt_iwslt14, mt_iwslt14_gpu, mt_wmt14_de
from normkit_papers.recipes import cifar10_tiny_vit
from normkit_papers.study import Base, Bases
from normkit_papers.train.config import ImageRun, Images, Run

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"


def mt_wmt14_fr() -> Run:
    """English to French on WMT'14, Transformer big, as in Unified Normalization (Table 1).

    NORMKIT_DATA=FOLDER papers train mt_wmt14_fr --devices 8 --accumulate 16

    Cost: many GPUs.
    """
    return dataclasses.replace(
        mt_wmt14_de(), name="mt_wmt14_fr", data="wmt14.en-fr", valid_every=2250, checkpoint_every=2250, average=5
    )


def imagenet_t2t_vit_14() -> ImageRun:
    """T2T-ViT-14 on ImageNet, as in Unified Normalization (B.2).

    NORMKIT_DATA=FOLDER papers train imagenet_t2t_vit_14 --model.norm 'un(warmup=4000, outlier_filtration=True)'

    Cost: days on 8 GPUs. The paper's accuracy: layer 81.5, un 80.9, batch 79.8; mabn and power(groups=0) fail.

    The paper's last 10 epochs at a constant rate are the end of the cosine here. Colour jitter is off, because timm
    replaces it by RandAugment.
    """
    epoch = 1_281_167 // (8 * 64)
    return ImageRun(
        name="imagenet_t2t_vit_14", data="imagenet",
        model=Model(arch="t2t_vit_14", image_size=224, layer_drop=0.1),
        images=Images(
            crop="area", rand_augment=RAND_AUGMENT, erase=0.25, mixup=0.8, cutmix=1.0, mix_switch=0.5, test_crop=0.9,
        ),
        steps=310 * epoch, batch_tokens=64, devices=8, workers=10,
        lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05, clip=0.0, ema=0.99996,
        warmup=10 * epoch, warmup_start=1e-6, floor_lr=1e-5,
        valid_every=epoch, checkpoint_every=epoch, keep=2,
        record_every=500,
    )  # fmt: skip


def imagenet_swin_t() -> Run:
    """Swin-T on ImageNet by its authors' settings, as in Unified Normalization (Table 2).

    NORMKIT_DATA=FOLDER papers train imagenet_swin_t --model.norm 'un(warmup=4000, outlier_filtration=True)'

    Cost: days on 8 GPUs. The paper's accuracy: layer 81.3, un 81.0, mabn 80.9, power(groups=0) 80.9, batch 80.8.
    """
    epoch = 1_281_167 // (8 * 128)
    paper = imagenet_t2t_vit_14()
    return dataclasses.replace(
        paper, name="imagenet_swin_t",
        model=Model(arch="swin_t", image_size=224, layer_drop=0.2),
        images=dataclasses.replace(paper.images, test_crop=0.875),
        steps=300 * epoch, batch_tokens=128,
        lr=1e-3, clip=5.0, ema=0.0,
        warmup=20 * epoch, warmup_start=5e-7, floor_lr=5e-6,
        valid_every=epoch, checkpoint_every=epoch,
        precision="bf16-mixed",
    )  # fmt: skip


def cifar10_t2t_vit_14_tuned() -> Run:
    """Fine-tune T2T-ViT-14 on CIFAR-10, as in Unified Normalization (Table 2).

    NORMKIT_DATA=FOLDER papers train cifar10_t2t_vit_14_tuned --weights runs/imagenet_t2t_vit_14

    Cost: hours on one GPU. The paper's accuracy, CIFAR-10 / CIFAR-100: layer 98.3 / 88.4, batch 96.6 / 88.2,
    un 98.3 / 88.9.

    The weights must have the same norm. All but the head learns at a hundredth of the rate. The final norm and the
    class token learn too (the authors' script leaves them out of the optimizer), and statistics warm up again.
    """
    return ImageRun(
        name="cifar10_t2t_vit_14_tuned", data="cifar10",
        model=Model(arch="t2t_vit_14", image_size=224),
        images=Images(padding=28),
        steps=60 * 390, batch_tokens=128, workers=8,
        body_lr=0.01, optimizer="sgd", lr=0.05, weight_decay=5e-4, clip=0.0, label_smoothing=0.0,
        floor_lr=2e-4,
        valid_every=390, checkpoint_every=390, keep=1,
        record_every=100,
    )  # fmt: skip


def cifar100_t2t_vit_14_tuned() -> Run:
    """Fine-tune T2T-ViT-14 on CIFAR-100, as on CIFAR-10.

    NORMKIT_DATA=FOLDER papers train cifar100_t2t_vit_14_tuned --weights runs/imagenet_t2t_vit_14

    Cost: hours on one GPU.
    """
    return dataclasses.replace(cifar10_t2t_vit_14_tuned(), name="cifar100_t2t_vit_14_tuned", data="cifar100")


def cifar10_swin_t_gpu() -> Run:
    """Swin-T on CIFAR-10 at 224 x 224, from scratch, 20 epochs in bf16.

    NORMKIT_DATA=FOLDER papers train cifar10_swin_t_gpu --model.norm un

    Cost: tens of minutes on a large GPU.
    """
    return ImageRun(
        name="cifar10_swin_t_gpu", data="cifar10",
        model=Model(arch="swin_t", image_size=224, layer_drop=0.1),
        images=Images(padding=28, rand_augment=RAND_AUGMENT, channels_last=True),
        steps=20 * 195, batch_tokens=256, workers=12,
        lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05, clip=5.0,
        warmup=2 * 195,
        valid_every=195, checkpoint_every=195, keep=1,
        precision="bf16-mixed", record_every=100,
    )  # fmt: skip


def cifar10_t2t_vit_14_gpu() -> Run:
    """T2T-ViT-14 on CIFAR-10 at 224 x 224, from scratch, 20 epochs in bf16.

    NORMKIT_DATA=FOLDER papers train cifar10_t2t_vit_14_gpu --model.norm un

    Cost: tens of minutes on a large GPU.
    """
    swin = cifar10_swin_t_gpu()
    return dataclasses.replace(
        swin, name="cifar10_t2t_vit_14_gpu", model=dataclasses.replace(swin.model, arch="t2t_vit_14")
    )


def cifar10_t2t_vit_14_pocket() -> Run:
    """T2T-ViT-14 on CIFAR-10 at 32 x 32: four tokens and the class token, all 14 layers.

    NORMKIT_DATA=FOLDER papers train cifar10_t2t_vit_14_pocket --model.norm un

    Cost: six minutes on one CPU core.
    """
    return dataclasses.replace(
        cifar10_tiny_vit(), name="cifar10_t2t_vit_14_pocket", model=Model(arch="t2t_vit_14", image_size=32), lr=5e-4
    )


IWSLT14_UN: Bases = {  # the script of Unified Normalization: run_iwslt14_train_un.sh
    "pocket": IWSLT14["pocket"],
    "gpu": Base("iwslt14.de-en.un", mt_iwslt14_gpu, {"lr": 7e-4}),
    "paper": Base("iwslt14.de-en.un", mt_iwslt14, {"lr": 7e-4, "warmup": 6000, "patience": 0}),
}
WMT14_FR: Bases = {"paper": Base("wmt14.en-fr.big", mt_wmt14_fr)}
CIFAR10: Bases = {
    "pocket": Base("cifar10", cifar10_tiny_vit),
    "gpu": Base("cifar10.t2t", cifar10_t2t_vit_14_gpu),
}
CIFAR100: Bases = {"gpu": Base("cifar100.t2t", cifar10_t2t_vit_14_gpu, {"data": "cifar100"})}
CIFAR10_SWIN: Bases = {"gpu": Base("cifar10.swin", cifar10_swin_t_gpu)}
IMAGENET_T2T: Bases = {"paper": Base("imagenet.t2t", imagenet_t2t_vit_14)}
T2T: Bases = {"pocket": Base("cifar10.t2t", cifar10_t2t_vit_14_pocket), "gpu": CIFAR10["gpu"], **IMAGENET_T2T}
IMAGENET_SWIN: Bases = {"paper": Base("imagenet.swin", imagenet_swin_t)}
