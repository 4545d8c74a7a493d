"""Recipes of PowerNorm (Shen et al., ICML 2020): translation, language models, ResNet-20."""

import dataclasses

from normkit_papers.models.config import Model
from normkit_papers.recipes import cifar10_tiny_vit, mt_multi30k
from normkit_papers.study import Base, Bases, Settings, Times, override
from normkit_papers.train.config import ImageRun, Images, LanguageRun, Run, TranslationRun

LARGE_BATCHES: Settings = {"accumulate": Times(4), "steps": Times(1 / 4)}
POST_NORM: dict[str, Settings] = {"pocket": {"lr": 5e-4, "warmup": 400}}  # at 2e-3 the loss stayed at 6.58 to step 320
SCALING_NMT: dict[str, Settings] = {  # Ott et al. 2018, section 3: 128 GPUs of 3,584 tokens, twice the learning rate
    "pocket": {**LARGE_BATCHES, "lr": 1e-3, "warmup": 100},
    "gpu": {**LARGE_BATCHES, "lr": Times(2), "warmup": Times(1 / 4)},
    "paper": {"batch_tokens": Times(3584 / 4096), "lr": 1e-3, "warmup": 4000},
}


def mt_iwslt14() -> Run:
    """German to English on IWSLT'14, as in the PowerNorm paper (A.1).

    NORMKIT_DATA=FOLDER papers train mt_iwslt14 --model.norm-at 'encoder.*' power

    Cost: hours on one GPU. The paper's BLEU with all 160,239 training pairs: layer 35.5, power 35.9, batch 34.4.
    Differs: dropout of 0.3, as in the authors' script; A.1 gives 0 for this model.
    """
    return TranslationRun(
        name="mt_iwslt14", data="iwslt14.de-en",
        model=Model(
            width=512, hidden=1024, depth=6, heads=4, share=True,
            dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1,
        ),
        steps=100_000, batch_tokens=7500,  # about fairseq's 4096 of the longer side
        lr=1.5e-3, betas=(0.9, 0.98), weight_decay=1e-4, clip=0.0, label_smoothing=0.1,
        schedule="inverse_sqrt", warmup=8000, warmup_start=1e-7,
        valid_every=1100,  # about an epoch of all pairs
        patience=5, checkpoint_every=1100, keep=10, average=10,
        beam=5, length_penalty=1.0, length_offset=0.0, record_every=500, valid_items=0, test_items=0,
    )  # fmt: skip


def mt_iwslt14_gpu() -> Run:
    """German to English on IWSLT'14, the PowerNorm paper's model in large batches.

    NORMKIT_DATA=FOLDER papers train mt_iwslt14_gpu

    Cost: two minutes on an H200.
    """
    return dataclasses.replace(
        mt_iwslt14(), name="mt_iwslt14_gpu", steps=1500,
        batch_tokens=30_000, lr=1e-3, warmup=500,
        valid_every=250, patience=0, checkpoint_every=125, keep=5, average=5, test_items=2000,
        precision="bf16-mixed",
    )  # fmt: skip


def mt_iwslt14_pocket() -> Run:
    """German to English on IWSLT'14, the small model of `mt_multi30k`.

    NORMKIT_DATA=FOLDER papers train mt_iwslt14_pocket

    Cost: minutes on one CPU core.
    """
    pocket = mt_multi30k()
    return dataclasses.replace(pocket, name="mt_iwslt14_pocket", data="iwslt14.de-en", subwords=8000, test_items=1000)


def mt_wmt14_de() -> Run:
    """English to German on WMT'14, Transformer big, as in the PowerNorm paper (A.1).

    NORMKIT_DATA=FOLDER papers train mt_wmt14_de --devices 8 --accumulate 16

    Cost: many GPUs. The paper's BLEU, on 128 GPUs of 4,096 tokens: layer 29.5, batch 28.1, power 30.1. Differs: 32,764
    subwords, as in the authors' script; A.1 has 37,000.
    """
    return TranslationRun(
        name="mt_wmt14_de", data="wmt14.en-de",
        model=Model(
            width=1024, hidden=4096, depth=6, heads=16, max_length=256,
            share=True,
            dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1,
        ),
        steps=300_000, batch_tokens=7500, accumulate=128,
        lr=3e-3, clip=0.0, label_smoothing=0.1,
        schedule="inverse_sqrt", warmup=8000, warmup_start=1e-7,
        valid_every=250,  # about an epoch
        patience=10, checkpoint_every=250, keep=10, average=10,
        precision="bf16-mixed", record_every=1000, length_offset=0.0, valid_items=0, test_items=0,
    )  # fmt: skip


def mt_scaling_nmt() -> Run:
    """English to German on WMT'14 by large batches, after Ott et al. 2018 ("Scaling NMT").

    NORMKIT_DATA=FOLDER papers train mt_scaling_nmt --devices 8 --accumulate 16

    Cost: many GPUs. The paper's BLEU: 29.3.
    """
    paper = dataclasses.replace(mt_wmt14_de(), name="mt_scaling_nmt")
    return override(paper, {"model.placement": "post", **SCALING_NMT["paper"]})


def lm_ptb_core1() -> Run:
    """Tensorized Transformer, core-1, on Penn Treebank, as in the PowerNorm paper (A.2).

    NORMKIT_DATA=FOLDER papers train lm_ptb_core1 --model.norm power

    Cost: minutes on one GPU. The paper's test perplexity: layer 53.2, batch 60.7, pnv 55.3, power 47.6. Differs:
    post-norm, as in the code of Ma et al. (2019) that A.2 follows; section 5.1 has pre-norm in all experiments.
    """
    return LanguageRun(
        name="lm_ptb_core1", data="ptb", context=32,
        model=Model(
            width=256, hidden=2100, depth=3, heads=1, max_length=32,
            attention="multilinear", rank=40, placement="post",
            dropout=0.3, hidden_dropout=0.3,
        ),
        steps=7260,  # 30 epochs
        batch_tokens=3840,  # 120 pieces

        lr=2.5e-4, betas=(0.9, 0.999), clip=0.25, label_smoothing=0.1,
        warmup=4000, valid_every=242, checkpoint_every=242,
        record_every=100,
    )  # fmt: skip


def lm_ptb_pocket() -> Run:
    """Tensorized Transformer, core-1, on Penn Treebank, trained briefly.

    NORMKIT_DATA=FOLDER papers train lm_ptb_pocket

    Cost: an hour on one CPU core.
    """
    return dataclasses.replace(
        lm_ptb_core1(), name="lm_ptb_pocket",
        batch_tokens=1280, steps=4000, threads=1, lr=1e-3,
        warmup=400, valid_every=400, checkpoint_every=400,
    )  # fmt: skip


def lm_wikitext103() -> Run:
    """Tensorized Transformer on WikiText-103, as in the PowerNorm paper (A.2).

    NORMKIT_DATA=FOLDER papers train lm_wikitext103 --model.norm power

    Cost: days on one GPU. The paper's test perplexity: layer 20.9, batch 27.2, pnv 21.3, power 17.9.

    Label smoothing needs the scores of all 267,735 words. Without it (`--label-smoothing 0`), adaptive embeddings
    save most of that memory.
    """
    ptb = lm_ptb_core1()
    model = dataclasses.replace(ptb.model, depth=6, max_length=80, adaptive=(20_000, 40_000, 200_000))
    epoch = 21_500  # steps of 60 pieces
    return dataclasses.replace(
        ptb, name="lm_wikitext103", data="wikitext-103", context=80, model=model, steps=30 * epoch, batch_tokens=4800,
        valid_every=epoch, checkpoint_every=epoch, record_every=1000,
    )  # fmt: skip


def cifar10_resnet20_paper() -> Run:
    """ResNet-20 on CIFAR-10, as in He et al. 2016 (section 4.2).

    NORMKIT_DATA=FOLDER papers train cifar10_resnet20_paper --model.norm batch

    Cost: minutes on one GPU. The paper's accuracy: 91.25 with batch normalization.
    """
    return ImageRun(
        name="cifar10_resnet20_paper", data="cifar10",
        model=Model(arch="resnet20", norm="batch"),
        images=Images(channels_last=True),
        steps=64_000, batch_tokens=128, workers=8,
        optimizer="sgd", lr=0.1, weight_decay=1e-4, clip=0.0, label_smoothing=0.0,
        schedule="steps", milestones=(32_000, 48_000),
        valid_every=3900,  # ten epochs
        checkpoint_every=3900, keep=1, record_every=500,
    )  # fmt: skip


def cifar10_resnet20() -> Run:
    """ResNet-20 on CIFAR-10 at half its image size, as the PowerNorm paper's Figure 2.

    NORMKIT_DATA=FOLDER papers train cifar10_resnet20 --model.norm batch

    Cost: minutes on one CPU core.
    """
    return dataclasses.replace(
        cifar10_tiny_vit(), name="cifar10_resnet20",
        model=Model(arch="resnet20", image_size=16, norm="batch"),
        images=Images(held_out=2000, padding=2, channels_last=True),
        steps=700, lr=5e-3, warmup=70,
        valid_every=350, checkpoint_every=350,
    )  # fmt: skip


def cifar100_resnet20_paper() -> Run:
    """ResNet-20 on CIFAR-100, trained as on CIFAR-10.

    NORMKIT_DATA=FOLDER papers train cifar100_resnet20_paper --model.norm batch

    Cost: minutes on one GPU.
    """
    return dataclasses.replace(cifar10_resnet20_paper(), name="cifar100_resnet20_paper", data="cifar100")


IWSLT14: Bases = {
    "pocket": Base("iwslt14.de-en", mt_iwslt14_pocket),
    "gpu": Base("iwslt14.de-en", mt_iwslt14_gpu),
    "paper": Base("iwslt14.de-en", mt_iwslt14),
}
IWSLT14_LONG: Bases = {
    "pocket": Base("iwslt14.de-en.long", mt_iwslt14_pocket, {"steps": 5000, "warmup": 500, "valid_every": 1000}),
}
WMT14_DE_BIG: Bases = {"paper": Base("wmt14.en-de.big", mt_wmt14_de)}
PTB: Bases = {
    "pocket": Base("ptb", lm_ptb_pocket),
    "gpu": Base("ptb", lm_ptb_core1),  # the paper's setting is minutes of a GPU
    "paper": Base("ptb", lm_ptb_core1),
}
PTB_SHORT: Bases = {"pocket": Base("ptb.short", lm_ptb_pocket, {"steps": 1000, "warmup": 100, "valid_every": 500})}
WIKITEXT103: Bases = {"paper": Base("wikitext-103", lm_wikitext103)}
RESNET20: Bases = {
    "pocket": Base("cifar10.resnet20", cifar10_resnet20),
    "gpu": Base("cifar10.resnet20", cifar10_resnet20_paper),  # the paper's setting is minutes of a GPU
    "paper": Base("cifar10.resnet20", cifar10_resnet20_paper),
}
RESNET20_HOUR: Bases = {
    "pocket": Base(
        "cifar10.resnet20.hour",
        cifar10_resnet20_paper,
        {
            "images.held_out": 2000,
            "steps": 7500,  # 20 epochs
            "schedule": "cosine",
            "warmup": 375,
            "workers": 0,
            "threads": 1,
            "valid_every": 1875,
            "checkpoint_every": 375,
            "record_every": 25,
        },
    )
}
