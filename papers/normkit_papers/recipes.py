"""Recipes of our own, on data that installs with packages or trains in minutes.

A recipe is a function that returns a `Run`. Its docstring gives the command, the cost and the score to expect.
"""

import dataclasses

from normkit_papers.models.config import Model
from normkit_papers.study import Base, Bases
from normkit_papers.train.config import DigitsRun, G2PRun, ImageRun, Images, LanguageRun, Run, TranslationRun


def g2p_cmudict() -> Run:
    """Spelling to sound on the CMU Pronouncing Dictionary: one model of `papers demo`.

    papers train g2p_cmudict

    Cost: 2 minutes on one CPU core.
    """
    return G2PRun(
        name="g2p_cmudict", data="cmudict",
        model=Model(width=96, hidden=192, depth=2, heads=4, tie=False),
        steps=5000, batch_tokens=500, threads=1,
        lr=3e-3, weight_decay=0.1, label_smoothing=0.1,
        warmup=500, valid_every=500, checkpoint_every=1000,
    )  # fmt: skip


def lm_pydoc() -> Run:
    """Word-level language model on the Python reference that ships with CPython.

    papers train lm_pydoc

    Cost: 2 min 30 s on one CPU core. Expected perplexity: 12.9 (12,931 test words, CPython 3.11, one seed).
    """
    return LanguageRun(
        name="lm_pydoc", data="pydoc",
        model=Model(width=128, hidden=512, depth=3, heads=4, dropout=0.2),
        steps=1500, batch_tokens=1024,
        lr=2e-3, label_smoothing=0.0, weight_decay=0.05,
        warmup=150, valid_every=150, checkpoint_every=500,
    )  # fmt: skip


def lm_wikitext2() -> Run:
    """Language model on WikiText-2, a decoder of 3 layers of width 256.

    NORMKIT_DATA=FOLDER papers train lm_wikitext2

    Cost: an hour on one CPU core.
    """
    return LanguageRun(
        name="lm_wikitext2", data="wikitext-2",
        model=Model(width=256, hidden=1024, depth=3, heads=4, dropout=0.3, hidden_dropout=0.1, max_length=64),
        steps=6000, batch_tokens=1024, threads=1,
        lr=1e-3, label_smoothing=0.0, weight_decay=0.05,
        warmup=600, valid_every=500, checkpoint_every=500,
    )  # fmt: skip


def lm_rotary() -> Run:
    """Language model of today's kind on the Python reference: pre-norm, rotary positions, tied, 1 M parameters.

    papers train lm_rotary --optimizer muon

    Cost: a minute on one CPU core.
    """
    return LanguageRun(
        name="lm_rotary", data="pydoc", context=128,
        model=Model(attention="rotary", width=128, hidden=512, depth=4, heads=4, dropout=0.1, max_length=128),
        steps=500, batch_tokens=512, threads=1,
        lr=3e-3, betas=(0.9, 0.95), momentum=0.95, label_smoothing=0.0, weight_decay=0.1,
        warmup=50, checkpoint_every=250, record_every=0,
    )  # fmt: skip


def vit_digits() -> Run:
    """Tiny Vision Transformer on the 8 x 8 digits of scikit-learn.

    papers train vit_digits

    Cost: half a minute on one CPU core. Expected accuracy: 97.9 % (96 test images, sampling error 1.5, one seed).
    """
    return DigitsRun(
        name="vit_digits", data="digits",
        model=Model(width=64, hidden=128, depth=3, heads=4, dropout=0.1),
        steps=1500, batch_tokens=64,
        lr=2e-3, label_smoothing=0.1, weight_decay=0.05,
        warmup=150, valid_every=150, checkpoint_every=500,
    )  # fmt: skip


def cifar10_tiny_vit() -> Run:
    """Tiny Vision Transformer on CIFAR-10.

    NORMKIT_DATA=FOLDER papers train cifar10_tiny_vit --model.norm 'un(warmup=50)'

    Cost: minutes on one CPU core.
    """
    return ImageRun(
        name="cifar10_tiny_vit", data="cifar10",
        model=Model(arch="tiny_vit", image_size=32, patch=8, width=96, hidden=192, depth=4, heads=4),
        images=Images(held_out=2000),
        steps=500, batch_tokens=64, threads=1,
        lr=2e-3, weight_decay=0.05, label_smoothing=0.1,
        warmup=50, valid_every=250, checkpoint_every=250,
    )  # fmt: skip


def mt_multi30k() -> Run:
    """German to English on Multi30k, 29,000 image captions.

    NORMKIT_DATA=FOLDER papers train mt_multi30k --model.norm power

    Cost: minutes on one CPU core.
    """
    return TranslationRun(
        name="mt_multi30k", data="multi30k.de-en",
        model=Model(
            width=192, hidden=768, depth=3, heads=4, share=True,
            dropout=0.1, attention_dropout=0.1, hidden_dropout=0.1,
        ),
        steps=1600, batch_tokens=1000, threads=1,
        lr=2e-3, label_smoothing=0.1, warmup=200,
        valid_every=400, checkpoint_every=400, test_items=0,
    )  # fmt: skip


def mt_speedrun() -> Run:
    """German to English on Multi30k at full GPU speed: large batches in bf16.

    NORMKIT_DATA=FOLDER papers train mt_speedrun

    Cost: a minute or two on one GPU.
    """
    return dataclasses.replace(
        mt_multi30k(), name="mt_speedrun",
        steps=1500, batch_tokens=16_000, threads=None,
        warmup=300, valid_every=250, checkpoint_every=0,
        precision="bf16-mixed", record_every=0,
    )  # fmt: skip


CMUDICT: Bases = {"pocket": Base("cmudict", g2p_cmudict, {"steps": 3600, "warmup": 360})}
MULTI30K: Bases = {
    "pocket": Base("multi30k.de-en", mt_multi30k),
    "gpu": Base("multi30k.de-en", mt_multi30k, {"steps": 8000, "warmup": 800}),
}
MULTI30K_HOUR: Bases = {
    "pocket": Base("multi30k.de-en.hour", mt_multi30k, {"steps": 10_000, "warmup": 1000, "valid_every": 2000}),
}
WIKITEXT2: Bases = {"pocket": Base("wikitext-2", lm_wikitext2)}
ROTARY: Bases = {"pocket": Base("pydoc.rotary", lm_rotary)}
ROTARY_WIKITEXT2: Bases = {
    "pocket": Base("wikitext-2.rotary", lm_rotary, {"data": "wikitext-2", "subwords": 2000, "model.dropout": 0.0}),
}
