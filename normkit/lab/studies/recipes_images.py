"""Named runs on pictures; rows of RECIPES."""

import dataclasses
from collections.abc import Callable

from normkit.lab.models.config import Model
from normkit.lab.train.config import Images, Run

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"


def cifar10_tiny_vit() -> Run:
    """CIFAR-10 with a tiny Vision Transformer: minutes on one CPU core.

    NORMKIT_DATA=FOLDER normkit train cifar10_tiny_vit --model.norm 'un(warmup=50)'
    """
    return Run(
        name="cifar10_tiny_vit",
        task="images",
        data="cifar10",
        model=Model(arch="tiny_vit", image_size=32, patch=8, width=96, hidden=192, depth=4, heads=4),
        images=Images(held_out=2000),
        steps=500,
        batch_tokens=64,
        bucketing=False,
        lr=2e-3,
        weight_decay=0.05,
        label_smoothing=0.1,
        warmup=50,
        valid_every=250,
        checkpoint_every=250,
        threads=1,
    )


def cifar10_resnet20() -> Run:
    """CIFAR-10, its pictures at half their size, with ResNet-20 of PowerNorm's Figure 2: minutes on one CPU core.

    NORMKIT_DATA=FOLDER normkit train cifar10_resnet20 --model.norm batch
    """
    return dataclasses.replace(
        cifar10_tiny_vit(),
        name="cifar10_resnet20",
        model=Model(arch="resnet20", image_size=16, norm="batch"),
        images=Images(held_out=2000, padding=2, channels_last=True),
        steps=700,
        lr=5e-3,
        warmup=70,
        valid_every=350,
        checkpoint_every=350,
    )


def cifar10_resnet20_paper() -> Run:
    """CIFAR-10 with ResNet-20 as He et al. 2016 train it (section 4.2): 64,000 steps, minutes of a GPU.

    NORMKIT_DATA=FOLDER normkit train cifar10_resnet20_paper --model.norm batch

    The paper's accuracy: 91.25 with batch normalization.
    """
    return Run(
        name="cifar10_resnet20_paper",
        task="images",
        data="cifar10",
        model=Model(arch="resnet20", norm="batch"),
        images=Images(channels_last=True),
        steps=64_000,
        batch_tokens=128,
        bucketing=False,
        optimizer="sgd",
        lr=0.1,
        weight_decay=1e-4,
        clip=0.0,
        label_smoothing=0.0,
        schedule="steps",
        milestones=(32_000, 48_000),
        valid_every=3900,  # ten epochs
        checkpoint_every=3900,
        keep=1,
        record_every=500,
        workers=8,
    )


def cifar100_resnet20_paper() -> Run:
    """CIFAR-100 with ResNet-20, trained as on CIFAR-10.

    NORMKIT_DATA=FOLDER normkit train cifar100_resnet20_paper --model.norm batch
    """
    return dataclasses.replace(cifar10_resnet20_paper(), name="cifar100_resnet20_paper", data="cifar100")


def cifar10_swin_t_gpu() -> Run:
    """CIFAR-10 at 224 x 224 with Swin-T from scratch, 20 epochs in bf16: a large GPU, tens of minutes.

    NORMKIT_DATA=FOLDER normkit train cifar10_swin_t_gpu --model.norm un
    """
    return Run(
        name="cifar10_swin_t_gpu",
        task="images",
        data="cifar10",
        model=Model(arch="swin_t", image_size=224, layer_drop=0.1),
        images=Images(padding=28, rand_augment=RAND_AUGMENT, channels_last=True),
        steps=20 * 195,
        batch_tokens=256,
        bucketing=False,
        lr=5e-4,
        betas=(0.9, 0.999),
        weight_decay=0.05,
        clip=5.0,
        warmup=2 * 195,
        valid_every=195,
        checkpoint_every=195,
        keep=1,
        precision="bf16-mixed",
        record_every=100,
        workers=12,
    )


def cifar10_t2t_vit_14_gpu() -> Run:
    """CIFAR-10 at 224 x 224 with T2T-ViT-14 from scratch, 20 epochs in bf16: a large GPU, tens of minutes.

    NORMKIT_DATA=FOLDER normkit train cifar10_t2t_vit_14_gpu --model.norm un
    """
    swin = cifar10_swin_t_gpu()
    return dataclasses.replace(
        swin, name="cifar10_t2t_vit_14_gpu", model=dataclasses.replace(swin.model, arch="t2t_vit_14")
    )


def cifar10_t2t_vit_14_tuned() -> Run:
    """CIFAR-10 with T2T-ViT-14 of ImageNet, fine-tuned as Unified Normalization does it (Table 2): a GPU, hours.

    NORMKIT_DATA=FOLDER normkit train cifar10_t2t_vit_14_tuned --weights runs/imagenet_t2t_vit_14

    The weights must be of the same norm. All but the head learns at a hundredth of the rate; the final norm and the
    class token learn too, where the authors' script leaves them out of the optimizer, and the warm-up of statistics
    begins anew. The paper's accuracy, CIFAR-10 and CIFAR-100: layer 98.3 / 88.4, batch 96.6 / 88.2, un 98.3 / 88.9.
    """
    return Run(
        name="cifar10_t2t_vit_14_tuned",
        task="images",
        data="cifar10",
        model=Model(arch="t2t_vit_14", image_size=224),
        images=Images(padding=28),
        body_lr=0.01,
        steps=60 * 390,
        batch_tokens=128,
        bucketing=False,
        optimizer="sgd",
        lr=0.05,
        floor_lr=2e-4,
        weight_decay=5e-4,
        clip=0.0,
        label_smoothing=0.0,
        valid_every=390,
        checkpoint_every=390,
        keep=1,
        record_every=100,
        workers=8,
    )


def cifar100_t2t_vit_14_tuned() -> Run:
    """CIFAR-100 with T2T-ViT-14 of ImageNet, fine-tuned as on CIFAR-10.

    NORMKIT_DATA=FOLDER normkit train cifar100_t2t_vit_14_tuned --weights runs/imagenet_t2t_vit_14
    """
    return dataclasses.replace(cifar10_t2t_vit_14_tuned(), name="cifar100_t2t_vit_14_tuned", data="cifar100")


def imagenet_t2t_vit_14() -> Run:
    """ImageNet with T2T-ViT-14 as Unified Normalization trains it (B.2): 8 GPUs, days.

    NORMKIT_DATA=FOLDER normkit train imagenet_t2t_vit_14 --model.norm 'un(warmup=4000, outlier_filtration=True)'

    The paper's accuracy: layer 81.5, un 80.9, batch 79.8; mabn and power(groups=0) fail. Its 10 epochs at the last
    learning rate are the end of the cosine here. Its colour jitter is none: RandAugment takes its place in timm.
    """
    epoch = 1_281_167 // (8 * 64)
    return Run(
        name="imagenet_t2t_vit_14",
        task="images",
        data="imagenet",
        model=Model(arch="t2t_vit_14", image_size=224, layer_drop=0.1),
        images=Images(
            crop="area", rand_augment=RAND_AUGMENT, erase=0.25, mixup=0.8, cutmix=1.0, mix_switch=0.5, test_crop=0.9
        ),
        steps=310 * epoch,
        batch_tokens=64,
        bucketing=False,
        lr=5e-4,
        betas=(0.9, 0.999),
        weight_decay=0.05,
        clip=0.0,
        warmup=10 * epoch,
        warmup_start=1e-6,
        floor_lr=1e-5,
        ema=0.99996,
        valid_every=epoch,
        checkpoint_every=epoch,
        keep=2,
        devices=8,
        workers=10,
        record_every=500,
    )


def imagenet_swin_t() -> Run:
    """ImageNet with Swin-T by its authors' settings, as Unified Normalization compares norms: 8 GPUs, days.

    NORMKIT_DATA=FOLDER normkit train imagenet_swin_t --model.norm 'un(warmup=4000, outlier_filtration=True)'

    The paper's accuracy: layer 81.3, un 81.0, mabn 80.9, power(groups=0) 80.9, batch 80.8.
    """
    epoch = 1_281_167 // (8 * 128)
    paper = imagenet_t2t_vit_14()
    return dataclasses.replace(
        paper,
        name="imagenet_swin_t",
        model=Model(arch="swin_t", image_size=224, layer_drop=0.2),
        images=dataclasses.replace(paper.images, test_crop=0.875),
        steps=300 * epoch,
        batch_tokens=128,
        lr=1e-3,
        clip=5.0,
        warmup=20 * epoch,
        warmup_start=5e-7,
        floor_lr=5e-6,
        ema=0.0,
        valid_every=epoch,
        checkpoint_every=epoch,
        precision="bf16-mixed",
    )


IMAGE_RECIPES: dict[str, Callable[[], Run]] = {
    "cifar10_tiny_vit": cifar10_tiny_vit,
    "cifar10_resnet20": cifar10_resnet20,
    "cifar10_resnet20_paper": cifar10_resnet20_paper,
    "cifar100_resnet20_paper": cifar100_resnet20_paper,
    "cifar10_swin_t_gpu": cifar10_swin_t_gpu,
    "cifar10_t2t_vit_14_gpu": cifar10_t2t_vit_14_gpu,
    "cifar10_t2t_vit_14_tuned": cifar10_t2t_vit_14_tuned,
    "cifar100_t2t_vit_14_tuned": cifar100_t2t_vit_14_tuned,
    "imagenet_t2t_vit_14": imagenet_t2t_vit_14,
    "imagenet_swin_t": imagenet_swin_t,
}
"""By name."""
