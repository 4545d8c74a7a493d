"""Language models of other papers in PowerNorm's Tables 2 and 3.

Sizes and training are those of the paper that is named, as far as it gives them; each recipe lists what differs. The
recipes `..._brief` train small models on 256,000 words of Penn Treebank, 0.28 epochs.
"""

import dataclasses
from typing import Any

from normkit_papers.models.config import Model
from normkit_papers.powernorm.recipes import PTB, WIKITEXT103, lm_ptb_core1, lm_wikitext103
from normkit_papers.study import Base, Bases
from normkit_papers.train.config import LanguageRun, Run


def lm_ptb_lstm() -> Run:
    """Tied LSTM on Penn Treebank (Inan et al. 2017): two layers of 650.

    NORMKIT_DATA=FOLDER papers train lm_ptb_lstm

    Cost: an hour on one GPU. The PowerNorm paper's test perplexity: 48.7, its validation perplexity 75.7. Differs:
    without the augmented loss; cosine schedule.
    """
    epoch = 1327
    return LanguageRun(
        name="lm_ptb_lstm", data="ptb", context=35,
        model=Model(arch="lstm", width=650, hidden=650, depth=2, heads=1, dropout=0.5, hidden_dropout=0.5,
                    weight_drop=0.5),
        steps=60 * epoch, batch_tokens=20 * 35,
        optimizer="sgd", momentum=0.0, lr=20.0, clip=0.25, label_smoothing=0.0,
        valid_every=epoch, checkpoint_every=epoch, record_every=0,
    )  # fmt: skip


def lm_ptb_mos() -> Run:
    """AWD-LSTM with a mixture of softmaxes on Penn Treebank (Yang et al. 2018).

    NORMKIT_DATA=FOLDER papers train lm_ptb_mos

    Cost: a day on one GPU. The paper's test perplexity: 56.0. Differs: segments of 70 words without random lengths;
    no dropout of embedding rows and no penalties on activations; dropout of the latent vectors 0.225 in place of 0.29;
    the mean of the last ten epochs' weights in place of NT-ASGD.
    """
    epoch = 1106
    return dataclasses.replace(
        lm_ptb_lstm(), name="lm_ptb_mos", context=70, batch_tokens=12 * 70,
        model=Model(arch="lstm", width=280, hidden=960, last_hidden=620, depth=3, heads=1, experts=15, weight_drop=0.5,
                    dropout=0.4, hidden_dropout=0.225),
        steps=500 * epoch, schedule="constant", weight_decay=1.2e-6,
        valid_every=epoch, checkpoint_every=epoch, keep=10, average=10,
    )  # fmt: skip


def lm_ptb_adaptive() -> Run:
    """Transformer with adaptive input and output on Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_adaptive

    Cost: an hour on one GPU. The PowerNorm paper's test perplexity: 57.0. Baevski & Auli (2019) give no settings for
    this corpus: these sizes are ours.
    """
    epoch = 225
    return dataclasses.replace(
        lm_ptb_core1(), name="lm_ptb_adaptive", context=128, test_context=32, batch_tokens=32 * 128,
        model=Model(width=512, hidden=2048, depth=6, heads=8, adaptive=(2000, 6000), test_memory=96,
                    dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1),
        steps=60 * epoch, label_smoothing=0.0, valid_every=epoch, checkpoint_every=epoch,
    )  # fmt: skip


def lm_ptb_xl() -> Run:
    """Transformer-XL on Penn Treebank (Dai et al. 2019), of about the paper's 24 M parameters.

    NORMKIT_DATA=FOLDER papers train lm_ptb_xl

    Cost: hours on one GPU. The paper's test perplexity: 54.5. It gives no sizes; these are ours. Differs: without
    variational dropout and averaged weights.
    """
    epoch = 663
    return dataclasses.replace(
        lm_ptb_core1(), name="lm_ptb_xl", context=70, batch_tokens=20 * 70,
        model=Model(width=380, hidden=900, depth=14, heads=10, attention="relative", memory=70, placement="post",
                    dropout=0.5, hidden_dropout=0.2),
        steps=200 * epoch, label_smoothing=0.0, warmup=0, valid_every=epoch, checkpoint_every=epoch,
    )  # fmt: skip


def lm_wikitext103_lstm() -> Run:
    """Tied LSTM on WikiText-103 (Grave et al. 2017): one layer of 1,024.

    NORMKIT_DATA=FOLDER papers train lm_wikitext103_lstm

    Cost: days on one GPU. The paper's test perplexity: 48.7. Differs: a softmax over all words, without groups.
    """
    epoch = 73_700
    return dataclasses.replace(
        lm_ptb_lstm(), name="lm_wikitext103_lstm", data="wikitext-103", context=70, batch_tokens=20 * 70,
        model=Model(arch="lstm", width=1024, hidden=1024, depth=1, heads=1, dropout=0.1),
        steps=10 * epoch, valid_every=epoch, checkpoint_every=epoch,
    )  # fmt: skip


def lm_wikitext103_mos() -> Run:
    """AWD-LSTM with a mixture of three softmaxes on WikiText-103.

    NORMKIT_DATA=FOLDER papers train lm_wikitext103_mos

    Cost: days on one GPU of 80 GB. The PowerNorm paper's test perplexity: 29.2. Yang et al. (2018) give no settings
    for this corpus: these sizes are ours.
    """
    epoch = 73_700
    return dataclasses.replace(
        lm_ptb_mos(), name="lm_wikitext103_mos", data="wikitext-103", batch_tokens=20 * 70,
        model=Model(arch="lstm", width=400, hidden=2048, last_hidden=1024, depth=4, heads=1, experts=3,
                    weight_drop=0.1, dropout=0.1, hidden_dropout=0.1),
        steps=14 * epoch, weight_decay=0.0, valid_every=epoch // 4, checkpoint_every=epoch // 4,
    )  # fmt: skip


def lm_wikitext103_adaptive() -> Run:
    """Transformer with adaptive input and output on WikiText-103 (Baevski & Auli 2019).

    NORMKIT_DATA=FOLDER papers train lm_wikitext103_adaptive --devices 8

    Cost: days on eight GPUs. The paper's test perplexity: 20.5, with 2,560 words before those that are scored.
    Differs: momentum is not Nesterov's; one cosine.
    """
    return LanguageRun(
        name="lm_wikitext103_adaptive", data="wikitext-103", context=3072, test_context=512,
        model=Model(width=1024, hidden=4096, depth=16, heads=8, adaptive=(20_000, 60_000), max_length=3072,
                    test_memory=2560, dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1),
        steps=286_000, batch_tokens=3072, accumulate=3,
        optimizer="sgd", momentum=0.99, lr=1.0, clip=0.1, label_smoothing=0.0, floor_lr=1e-5,
        warmup=16_000, warmup_start=1e-7, valid_every=5000, checkpoint_every=5000, record_every=1000,
        precision="bf16-mixed",
    )  # fmt: skip


def lm_wikitext103_xl() -> Run:
    """Transformer-XL base on WikiText-103 (Dai et al. 2019).

    NORMKIT_DATA=FOLDER papers train lm_wikitext103_xl

    Cost: days on one GPU. The paper's test perplexity: 24.0, with 640 words of memory. Differs: embeddings of rare
    words are narrower, as in the large model; at the test, distances above 400 count as they are.
    """
    model = Model(
        width=410, hidden=2100, depth=16, heads=10, attention="relative", memory=150, test_memory=640,
        placement="post", dropout=0.1, hidden_dropout=0.1, adaptive=(20_000, 40_000, 200_000),
    )  # fmt: skip
    return dataclasses.replace(
        lm_wikitext103(), name="lm_wikitext103_xl", model=model, context=150, test_context=64, batch_tokens=60 * 150,
        steps=200_000, label_smoothing=0.0, warmup=0, valid_every=4000, checkpoint_every=4000,
    )  # fmt: skip


def lm_wikitext103_xl_large() -> Run:
    """Transformer-XL large on WikiText-103 (Dai et al. 2019).

    NORMKIT_DATA=FOLDER papers train lm_wikitext103_xl_large

    Cost: weeks on one GPU. The paper's test perplexity: 18.3, with 1,600 words of memory, on 64 TPUs. Differs: at the
    test, distances above 1,000 count as they are.
    """
    base = lm_wikitext103_xl()
    model = dataclasses.replace(base.model, width=1024, hidden=4096, depth=18, heads=16, memory=384, test_memory=1600,
                                dropout=0.2, attention_dropout=0.2, hidden_dropout=0.2)  # fmt: skip
    return dataclasses.replace(
        base, name="lm_wikitext103_xl_large", model=model, context=384, test_context=128, batch_tokens=8 * 384,
        accumulate=16, steps=4_000_000, warmup=16_000, precision="bf16-mixed",
    )  # fmt: skip


def lm_ptb_core1_brief() -> Run:
    """Tensorized Transformer, core-1, on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_core1_brief

    Cost: five minutes on one CPU core.
    """
    return dataclasses.replace(
        lm_ptb_core1(), name="lm_ptb_core1_brief", batch_tokens=640, steps=400, threads=1, lr=1e-3, warmup=40,
        valid_every=200, checkpoint_every=100, record_every=25,
    )  # fmt: skip


def _brief(name: str, model: Model, **changes: Any) -> Run:
    """Return the same training of another model, without label smoothing."""
    changes = {"label_smoothing": 0.0, "lr": 2e-3, **changes}
    return dataclasses.replace(lm_ptb_core1_brief(), name=name, model=model, **changes)


def lm_ptb_lstm_brief() -> Run:
    """Tied LSTM, two layers of 256, on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_lstm_brief

    Cost: five minutes on one CPU core. With SGD: with AdamW the validation loss rose while the model trained.
    """
    model = Model(arch="lstm", width=256, hidden=256, depth=2, dropout=0.2, hidden_dropout=0.2, weight_drop=0.2)
    return _brief("lm_ptb_lstm_brief", model, batch_tokens=320, steps=800, optimizer="sgd", momentum=0.0, lr=20.0,
                  warmup=0, valid_every=400, checkpoint_every=400, record_every=0)  # fmt: skip


def lm_ptb_mos_brief() -> Run:
    """AWD-LSTM with a mixture of three softmaxes on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_mos_brief

    Cost: five minutes on one CPU core. SGD without an average of weights.
    """
    model = Model(arch="lstm", width=128, hidden=256, last_hidden=192, depth=3, experts=3, dropout=0.1,
                  hidden_dropout=0.1, weight_drop=0.2)  # fmt: skip
    return _brief("lm_ptb_mos_brief", model, batch_tokens=320, steps=800, optimizer="sgd", momentum=0.0, lr=20.0,
                  schedule="constant", warmup=0, valid_every=400, checkpoint_every=400, record_every=0)  # fmt: skip


def lm_ptb_adaptive_brief() -> Run:
    """Transformer with adaptive input and output on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_adaptive_brief

    Cost: five minutes on one CPU core. Each test word has the 96 words before its piece.
    """
    model = Model(width=256, hidden=1024, depth=3, heads=4, adaptive=(2000, 6000), test_memory=96, dropout=0.1,
                  attention_dropout=0.1, hidden_dropout=0.1)  # fmt: skip
    return _brief("lm_ptb_adaptive_brief", model)


def lm_ptb_xl_brief() -> Run:
    """Transformer-XL, small, on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_xl_brief

    Cost: five minutes on one CPU core. Memory of 32 words in training, 96 at the test.
    """
    model = Model(width=192, hidden=768, depth=3, heads=4, attention="relative", memory=32, test_memory=96,
                  placement="post", dropout=0.1, hidden_dropout=0.1)  # fmt: skip
    return _brief("lm_ptb_xl_brief", model)


def lm_ptb_xl_large_brief() -> Run:
    """Transformer-XL of twice the size on 256,000 words of Penn Treebank.

    NORMKIT_DATA=FOLDER papers train lm_ptb_xl_large_brief

    Cost: five minutes on one CPU core.
    """
    small = lm_ptb_xl_brief()
    return dataclasses.replace(
        small, name="lm_ptb_xl_large_brief", model=dataclasses.replace(small.model, width=256, hidden=1024, depth=5)
    )


def _ptb(model: str, brief: Any, paper: Any) -> Bases:
    name = f"ptb.{model}"
    return {"pocket": Base(name, brief), "gpu": Base(name, paper), "paper": Base(name, paper)}


def _wikitext(model: str, brief: Any, paper: Any) -> Bases:
    """The corpus of a pocket run is WikiText-2."""
    small = Base(f"wikitext-2.{model}", brief, {"data": "wikitext-2"})
    return {"pocket": small, "paper": Base(f"wikitext-103.{model}", paper)}


LSTM = (_ptb("lstm", lm_ptb_lstm_brief, lm_ptb_lstm), _wikitext("lstm", lm_ptb_lstm_brief, lm_wikitext103_lstm))
MOS = (_ptb("mos", lm_ptb_mos_brief, lm_ptb_mos), _wikitext("mos", lm_ptb_mos_brief, lm_wikitext103_mos))
ADAPTIVE = (
    _ptb("adaptive", lm_ptb_adaptive_brief, lm_ptb_adaptive),
    _wikitext("adaptive", lm_ptb_adaptive_brief, lm_wikitext103_adaptive),
)
XL = (_ptb("xl", lm_ptb_xl_brief, lm_ptb_xl), _wikitext("xl", lm_ptb_xl_brief, lm_wikitext103_xl))
XL_LARGE: tuple[Bases, Bases] = (
    {"pocket": Base("ptb.xl-large", lm_ptb_xl_large_brief)},  # the tables print no figure for PTB
    _wikitext("xl-large", lm_ptb_xl_large_brief, lm_wikitext103_xl_large),
)
CORE: tuple[Bases, Bases] = (
    {**PTB, "pocket": Base("ptb.core", lm_ptb_core1_brief)},
    {**WIKITEXT103, "pocket": Base("wikitext-2.core", lm_ptb_core1_brief, {"data": "wikitext-2"})},
)
