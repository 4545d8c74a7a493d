"""Named runs. Each says what it needs and what to expect from it."""

import dataclasses
from collections.abc import Callable

from normkit.lab.models.config import Model
from normkit.lab.studies.recipes_images import IMAGE_RECIPES
from normkit.lab.studies.recipes_scenes import SCENE_RECIPES
from normkit.lab.train.config import Run


def g2p_cmudict() -> Run:
    """Spelling to sound on the CMU Pronouncing Dictionary: one model of `normkit demo`.

    normkit train g2p_cmudict
    """
    return Run(
        name="g2p_cmudict",
        task="g2p",
        data="cmudict",
        model=Model(width=96, hidden=192, depth=2, heads=4, tie=False),
        steps=5000,
        batch_tokens=500,
        lr=3e-3,
        weight_decay=0.1,
        label_smoothing=0.1,
        warmup=500,
        valid_every=500,
        checkpoint_every=1000,
        threads=1,
    )


def lm_pydoc() -> Run:
    """Word-level language model on the Python language reference that ships with CPython.

    normkit train lm_pydoc

    Perplexity 12.9 (CPython 3.11, 12,931 words of the test split, one seed), 2 min 30 s on one CPU core.
    """
    return Run(
        name="lm_pydoc",
        task="lm",
        data="pydoc",
        model=Model(width=128, hidden=512, depth=3, heads=4, dropout=0.2),
        steps=1500,
        batch_tokens=1024,
        bucketing=False,
        lr=2e-3,
        label_smoothing=0.0,
        weight_decay=0.05,
        warmup=150,
        valid_every=150,
        checkpoint_every=500,
    )


def vit_digits() -> Run:
    """A tiny Vision Transformer on the 8 x 8 digits of scikit-learn.

    normkit train vit_digits

    Accuracy 97.9 % (96 pictures of the test split, sampling error 1.5, one seed), half a minute on one CPU core.
    """
    return Run(
        name="vit_digits",
        task="digits",
        data="digits",
        model=Model(width=64, hidden=128, depth=3, heads=4, dropout=0.1),
        steps=1500,
        batch_tokens=64,
        bucketing=False,
        lr=2e-3,
        label_smoothing=0.1,
        weight_decay=0.05,
        warmup=150,
        valid_every=150,
        checkpoint_every=500,
    )


def mt_multi30k() -> Run:
    """German to English on Multi30k (29,000 captions of pictures): a translation model for minutes on one CPU core.

    NORMKIT_DATA=FOLDER normkit train mt_multi30k --model.norm power
    """
    return Run(
        name="mt_multi30k",
        task="mt",
        data="multi30k.de-en",
        model=Model(
            width=192, hidden=768, depth=3, heads=4, share=True, dropout=0.1, attention_dropout=0.1, hidden_dropout=0.1
        ),
        steps=1600,
        batch_tokens=1000,
        lr=2e-3,
        label_smoothing=0.1,
        warmup=200,
        valid_every=400,
        checkpoint_every=400,
        test_items=0,
        threads=1,
    )


def mt_iwslt14() -> Run:
    """German to English on IWSLT'14 as PowerNorm's paper trains it (Shen et al. 2020, A.1): a GPU, hours.

    normkit train mt_iwslt14 --model.norm-at 'encoder.*' power

    36.7 M parameters; the paper's BLEU: layer 35.5, power 35.9, batch 34.4 (with the 160,239 training pairs).
    """
    return Run(
        name="mt_iwslt14",
        task="mt",
        data="iwslt14.de-en",
        model=Model(
            width=512, hidden=1024, depth=6, heads=4, share=True, dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1
        ),
        steps=100_000,
        batch_tokens=7500,  # about fairseq's 4096 of the longer side
        lr=1.5e-3,
        betas=(0.9, 0.98),
        weight_decay=1e-4,
        clip=0.0,
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=8000,
        warmup_start=1e-7,
        valid_every=1100,  # about an epoch of all pairs
        patience=5,
        checkpoint_every=1100,
        keep=10,
        average=10,
        beam=5,
        length_penalty=1.0,
        length_offset=0.0,
        record_every=500,
        valid_items=0,
        test_items=0,
    )


def mt_iwslt14_gpu() -> Run:
    """German to English on IWSLT'14, the paper's model at ten minutes of one GPU.

    normkit train mt_iwslt14_gpu
    """
    return dataclasses.replace(
        mt_iwslt14(),
        name="mt_iwslt14_gpu",
        steps=6000,
        warmup=2000,
        valid_every=1000,
        patience=0,
        checkpoint_every=500,
        keep=5,
        average=5,
        precision="bf16-mixed",
    )


def mt_iwslt14_pocket() -> Run:
    """German to English on IWSLT'14, the small model of mt_multi30k: minutes on one CPU core.

    normkit train mt_iwslt14_pocket
    """
    pocket = mt_multi30k()
    return dataclasses.replace(pocket, name="mt_iwslt14_pocket", data="iwslt14.de-en", subwords=8000, test_items=1000)


def mt_ted_gl() -> Run:
    """Galician to English on TED talks as Transformers without Tears trains it (Table 1, App. A): a GPU.

    normkit train mt_ted_gl --model.norm scale --model.fixnorm

    The paper's BLEU: post-norm layer 18.47, pre-norm 19.09, with FixNorm 19.38, with ScaleNorm too 20.91.
    """
    return Run(
        name="mt_ted_gl",
        task="mt",
        data="ted.gl",
        model=Model(
            width=512,
            hidden=2048,
            depth=4,
            heads=4,
            init="small",
            share=True,
            mask_logits=True,
            dropout=0.4,
            attention_dropout=0.4,
            hidden_dropout=0.4,
            word_dropout=0.1,
        ),
        steps=100_000,
        batch_tokens=7500,  # about 4096 of the longer side
        lr=512**-0.5 * 8000**-0.5,  # the paper's lambda = 1
        betas=(0.9, 0.999),
        clip=1.0,
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=8000,
        stop_lr=1e-6,
        valid_every=100,
        valid_bleu=True,
        patience=50,
        checkpoint_every=100,
        keep=1,
        average=1,
        average_of="best",
        record_every=500,
        valid_items=0,
        test_items=0,
    )


def mt_ted_gl_pocket() -> Run:
    """Galician to English on TED talks, 11,000 pairs, below the size of mt_multi30k: minutes on one CPU core.

    normkit train mt_ted_gl_pocket

    In minutes nothing is learned by heart: dropout stays at 0.1, and there is none of words.
    """
    pocket = mt_multi30k()
    model = dataclasses.replace(pocket.model, width=128, hidden=512, depth=2, init="small", mask_logits=True)
    return dataclasses.replace(
        pocket, name="mt_ted_gl_pocket", data="ted.gl", model=model, steps=2000, valid_every=1000, checkpoint_every=1000
    )


def mt_iwslt15_vi() -> Run:
    """English to Vietnamese on IWSLT'15 as Transformers without Tears trains it: a GPU.

    normkit train mt_iwslt15_vi --model.norm scale --model.fixnorm
    """
    paper = mt_ted_gl()
    model = dataclasses.replace(paper.model, depth=6, heads=8, dropout=0.3, attention_dropout=0.3, hidden_dropout=0.3)
    return dataclasses.replace(
        paper, name="mt_iwslt15_vi", data="iwslt15.en-vi", model=model, steps=300_000, valid_every=1500,
        checkpoint_every=1500, patience=20,
    )  # fmt: skip


def mt_wmt14_de() -> Run:
    """English to German on WMT'14, Transformer big, as PowerNorm's paper trains it (A.1): many GPUs.

    normkit train mt_wmt14_de --devices 8 --accumulate 16

    The paper's BLEU: layer 29.5, batch 28.1, power 30.1, at 128 GPUs of 4096 tokens.
    """
    return Run(
        name="mt_wmt14_de",
        task="mt",
        data="wmt14.en-de",
        model=Model(
            width=1024,
            hidden=4096,
            depth=6,
            heads=16,
            share=True,
            dropout=0.3,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            max_length=256,
        ),
        steps=300_000,
        batch_tokens=7500,
        accumulate=128,
        lr=3e-3,
        clip=0.0,
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=8000,
        warmup_start=1e-7,
        valid_every=250,  # about an epoch
        patience=10,
        checkpoint_every=250,
        keep=10,
        average=10,
        precision="bf16-mixed",
        record_every=1000,
        length_offset=0.0,
        valid_items=0,
        test_items=0,
    )


def mt_wmt14_fr() -> Run:
    """English to French on WMT'14, Transformer big, as Unified Normalization compares norms (Table 1): many GPUs.

    normkit train mt_wmt14_fr --devices 8 --accumulate 16
    """
    return dataclasses.replace(
        mt_wmt14_de(), name="mt_wmt14_fr", data="wmt14.en-fr", valid_every=2250, checkpoint_every=2250, average=5
    )


def mt_speedrun() -> Run:
    """German to English on Multi30k at full speed of one GPU: bf16, one compiled graph a shape.

    normkit train mt_speedrun
    """
    return dataclasses.replace(
        mt_multi30k(),
        name="mt_speedrun",
        steps=1500,
        batch_tokens=16_000,
        warmup=300,
        valid_every=250,
        checkpoint_every=0,
        precision="bf16-mixed",
        compile=True,
        static=True,
        record_every=0,
        threads=None,
    )


def lm_ptb_core1() -> Run:
    """Penn Treebank with the tensorized Transformer, core-1, as PowerNorm's paper trains it (A.2): a GPU.

    normkit train lm_ptb_core1 --model.norm power

    The paper's perplexity of the test split: layer 53.2, batch 60.7, pnv 55.3, power 47.6.
    """
    return Run(
        name="lm_ptb_core1",
        task="lm",
        data="ptb",
        context=32,
        model=Model(
            width=256,
            hidden=2100,
            depth=3,
            heads=1,
            attention="multilinear",
            rank=40,
            placement="post",
            dropout=0.3,
            hidden_dropout=0.3,
            max_length=32,
        ),
        steps=7260,  # 30 epochs
        batch_tokens=3840,  # 120 pieces
        bucketing=False,
        lr=2.5e-4,
        betas=(0.9, 0.999),
        clip=0.25,
        label_smoothing=0.1,
        warmup=4000,
        valid_every=242,
        checkpoint_every=242,
        record_every=100,
    )


def lm_wikitext103() -> Run:
    """WikiText-103 with the tensorized Transformer, core-1, 6 layers, as PowerNorm's paper trains it (A.2): GPU, days.

    normkit train lm_wikitext103 --model.norm power

    The paper's perplexity of the test split: layer 20.9, batch 27.2, pnv 21.3, power 17.9. Label smoothing needs the
    scores of all 267,735 words; without it (`--label-smoothing 0`) adaptive embeddings save most of that memory.
    """
    ptb = lm_ptb_core1()
    model = dataclasses.replace(ptb.model, depth=6, max_length=80, adaptive=(20_000, 40_000, 200_000))
    epoch = 21_500  # steps of 60 pieces
    return dataclasses.replace(
        ptb, name="lm_wikitext103", data="wikitext-103", context=80, model=model, steps=30 * epoch, batch_tokens=4800,
        valid_every=epoch, checkpoint_every=epoch, record_every=1000,
    )  # fmt: skip


def lm_ptb_pocket() -> Run:
    """Penn Treebank with the tensorized Transformer, core-1: an hour on one CPU core.

    normkit train lm_ptb_pocket
    """
    return dataclasses.replace(
        lm_ptb_core1(),
        name="lm_ptb_pocket",
        batch_tokens=1280,
        steps=4000,
        lr=1e-3,
        warmup=400,
        valid_every=400,
        checkpoint_every=400,
        threads=1,
    )


def lm_wikitext2() -> Run:
    """WikiText-2 with a decoder of 3 layers of 256: an hour on one CPU core.

    normkit train lm_wikitext2
    """
    return Run(
        name="lm_wikitext2",
        task="lm",
        data="wikitext-2",
        model=Model(width=256, hidden=1024, depth=3, heads=4, dropout=0.3, hidden_dropout=0.1, max_length=64),
        steps=6000,
        batch_tokens=1024,
        bucketing=False,
        lr=1e-3,
        label_smoothing=0.0,
        weight_decay=0.05,
        warmup=600,
        valid_every=500,
        checkpoint_every=500,
        threads=1,
    )


RECIPES: dict[str, Callable[[], Run]] = {
    "g2p_cmudict": g2p_cmudict,
    "lm_pydoc": lm_pydoc,
    "vit_digits": vit_digits,
    "mt_multi30k": mt_multi30k,
    "mt_iwslt14": mt_iwslt14,
    "mt_iwslt14_gpu": mt_iwslt14_gpu,
    "mt_iwslt14_pocket": mt_iwslt14_pocket,
    "mt_ted_gl": mt_ted_gl,
    "mt_ted_gl_pocket": mt_ted_gl_pocket,
    "mt_iwslt15_vi": mt_iwslt15_vi,
    "mt_wmt14_de": mt_wmt14_de,
    "mt_wmt14_fr": mt_wmt14_fr,
    "mt_speedrun": mt_speedrun,
    "lm_ptb_core1": lm_ptb_core1,
    "lm_ptb_pocket": lm_ptb_pocket,
    "lm_wikitext103": lm_wikitext103,
    "lm_wikitext2": lm_wikitext2,
    **IMAGE_RECIPES,
    **SCENE_RECIPES,
}
