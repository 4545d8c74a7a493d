"""Recipes of Transformers without Tears (Nguyen and Salazar, IWSLT 2019)."""

import dataclasses
from typing import Any

from normkit_papers.models.config import Model
from normkit_papers.powernorm.recipes import mt_wmt14_de
from normkit_papers.recipes import mt_multi30k
from normkit_papers.study import Base, Bases, Times
from normkit_papers.train.config import Run, TranslationRun


def mt_ted_gl() -> Run:
    """Galician to English on TED talks, as in Transformers without Tears (Table 1).

    NORMKIT_DATA=FOLDER papers train mt_ted_gl --model.norm scale --model.fixnorm

    Cost: one GPU. The paper's BLEU: post-norm layer 18.47, pre-norm 19.09, with FixNorm 19.38, with
    ScaleNorm too 20.91.
    """
    return TranslationRun(
        name="mt_ted_gl", data="ted.gl",
        model=Model(
            width=512, hidden=2048, depth=4, heads=4,
            init="small", share=True, mask_logits=True,
            dropout=0.4, attention_dropout=0.4, hidden_dropout=0.4, word_dropout=0.1,
        ),
        steps=100_000, batch_tokens=7500,  # about 4096 of the longer side
        lr=512**-0.5 * 8000**-0.5,  # the paper's lambda = 1
        betas=(0.9, 0.999), clip=1.0, label_smoothing=0.1,
        schedule="inverse_sqrt", warmup=8000, stop_lr=1e-6,
        valid_every=100, valid_bleu=True, patience=50, checkpoint_every=100, keep=1, average=1, average_of="best",
        record_every=500, valid_items=0, test_items=0,
    )  # fmt: skip


def mt_ted_gl_pocket() -> Run:
    """Galician to English on TED talks, 11,000 pairs, a model below `mt_multi30k` in size.

    NORMKIT_DATA=FOLDER papers train mt_ted_gl_pocket

    Cost: minutes on one CPU core. Too short to overfit: dropout stays at 0.1, word dropout at 0.
    """
    pocket = mt_multi30k()
    model = dataclasses.replace(pocket.model, width=128, hidden=512, depth=2, init="small", mask_logits=True)
    return dataclasses.replace(
        pocket, name="mt_ted_gl_pocket", data="ted.gl", model=model, steps=2000, valid_every=1000, checkpoint_every=1000
    )


def mt_iwslt15_vi() -> Run:
    """English to Vietnamese on IWSLT'15, as in Transformers without Tears.

    NORMKIT_DATA=FOLDER papers train mt_iwslt15_vi --model.norm scale --model.fixnorm

    Cost: one GPU.
    """
    paper = mt_ted_gl()
    model = dataclasses.replace(paper.model, depth=6, heads=8, dropout=0.3, attention_dropout=0.3, hidden_dropout=0.3)
    return dataclasses.replace(
        paper, name="mt_iwslt15_vi", data="iwslt15.en-vi", model=model, steps=300_000, valid_every=1500,
        checkpoint_every=1500, patience=20,
    )  # fmt: skip


def _pocket(data: str, valid_bleu: bool = True) -> Base:
    """The pocket recipe on other data, scored on 1,000 test pairs, and with a curve on the validation split."""
    settings = {"data": data, "valid_bleu": valid_bleu, "valid_every": 250, "checkpoint_every": 250, "test_items": 1000}
    return Base(data, mt_ted_gl_pocket, settings)


WMT14_DE: Bases = {  # Tears, Appendix C
    "pocket": _pocket("tatoeba.de-en", valid_bleu=False),
    "paper": Base(
        "wmt14.en-de.base",
        mt_wmt14_de,
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
    ),
}


def _ted(language: str, epoch: int, pocket: str) -> Bases:
    """Bases of a larger pair of the paper's Table 1: 200 epochs of `epoch` steps; other data at pocket scale."""
    settings: dict[str, Any] = {"data": f"ted.{language}", "steps": 200 * epoch}
    settings |= {"valid_every": epoch, "checkpoint_every": epoch}
    return {"pocket": _pocket(pocket), "paper": Base(f"ted.{language}", mt_iwslt15_vi, settings)}


IWSLT15_VI: Bases = {"pocket": _pocket("iwslt15.en-vi"), "paper": Base("iwslt15.en-vi", mt_iwslt15_vi)}
TED: dict[str, Bases] = {
    "gl": {
        "pocket": Base("ted.gl", mt_ted_gl_pocket, {"valid_bleu": True}),
        "gpu": Base("ted.gl", mt_ted_gl, {"steps": 6000, "warmup": 2000, "lr": Times(2)}),
        "paper": Base("ted.gl", mt_ted_gl),
    },
    "sk": _ted("sk", 600, "debian.sk-en"),
    "he": _ted("he", 2000, "ted.az"),
    "ar": _ted("ar", 2000, "tatoeba.ar-en"),
}
TED_LONG: Bases = {
    "pocket": Base(
        "ted.gl.long",
        mt_ted_gl_pocket,
        {
            **dict.fromkeys(("model.dropout", "model.attention_dropout", "model.hidden_dropout"), 0.3),
            "steps": 10_000,
            "warmup": 1000,
        },
    )
}
