"""Named runs. Each says what it needs and what to expect from it."""

from collections.abc import Callable

from normkit.models.config import Model
from normkit.train.config import Run


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
        steps=2400,
        batch_tokens=2000,
        lr=2e-3,
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=400,
        valid_every=400,
        checkpoint_every=400,
        test_items=0,
        threads=1,
    )


RECIPES: dict[str, Callable[[], Run]] = {
    "g2p_cmudict": g2p_cmudict,
    "lm_pydoc": lm_pydoc,
    "vit_digits": vit_digits,
    "mt_multi30k": mt_multi30k,
}
