"""Core studies: all norms at all places of one model, on the same data, task by task."""

import dataclasses

from normkit.lab.papers.powernorm.recipes import PTB, RESNET20, RESNET20_HOUR
from normkit.lab.papers.tears.recipes import TED, TED_LONG
from normkit.lab.papers.tears.tables import DECAY
from normkit.lab.papers.unified.recipes import CIFAR10, CIFAR10_SWIN, IWSLT14_UN
from normkit.lab.recipes import CMUDICT, MULTI30K, MULTI30K_HOUR, WIKITEXT2
from normkit.lab.study import Column, Row, Settings, Study, Times

CORE = (
    Row(label="layer", settings={"model.norm": "layer"}),
    Row(label="batch", settings={"model.norm": "batch"}),
    Row(label="pnv", settings={"model.norm": "pnv"}),
    Row(label="power(groups=1)", settings={"model.norm": "power(groups=1)"}),
    Row(label="power(groups=0)", settings={"model.norm": "power(groups=0)"}),
    Row(label="un", settings={"model.norm": "un"}),
    Row(label="scale + FixNorm", settings={"model.norm": "scale", "model.fixnorm": True}),
)
FIXED = Row(
    label="layer + FixNorm", settings={"model.norm": "layer", "model.fixnorm": True}
)  # separates FixNorm's gain from ScaleNorm's
AUTOMATIC = tuple(
    Row(label=norm, settings={"model.norm": norm.replace("auto", "'auto'")})
    for norm in ("un(warmup=auto)", "power(groups=0, warmup=auto)", "power(groups=1, warmup=auto)")
)
FIXED_UN = Row(label="un(warmup=auto) + FixNorm", settings={"model.norm": "un(warmup='auto')", "model.fixnorm": True})
SCALED = tuple(
    dataclasses.replace(row, label=f"{row.label} + scale loss", settings={**(row.settings or {}), "scale_loss": 0.1})
    for row in (AUTOMATIC[0], FIXED_UN)
)
OTHERS = tuple(
    Row(label=norm, settings={"model.norm": norm}) for norm in ("rms", "group", "renorm", "mabn", "nonorm", "dyt")
)

MULTI30K_CORE = Study(
    id="core.multi30k",
    title="norms in translation, Multi30k De-En",
    rows=(*CORE, FIXED, FIXED_UN, *SCALED, *OTHERS),
    columns=(
        Column(title="BLEU", metric="bleu", base=MULTI30K),
        Column(title="BLEU greedy", metric="bleu running", base=MULTI30K),
        Column(title="greedy, statistics of donors of the same lengths", metric="bleu donors", base=MULTI30K),
        Column(title="greedy, of each test batch itself (until 0.2)", metric="bleu batch", base=MULTI30K),
        Column(title="greedy, calibrated", metric="bleu calibrated", base=MULTI30K),
    ),
)

MULTI30K_LONG = Study(
    id="core.multi30k-hour",
    title="norms in translation, an hour of one CPU core each, Multi30k De-En",
    rows=(
        *(row for row in CORE if row.label in ("layer", "power(groups=1)", "un", "pnv", "batch", "scale + FixNorm")),
        FIXED,
        FIXED_UN,
        *SCALED,
        *AUTOMATIC,
        *(
            Row(label=f"{norm}, shuffled", settings={"model.norm": norm, "bucketing": False})
            for norm in ("layer", "batch")
        ),
    ),
    columns=tuple(dataclasses.replace(column, base=MULTI30K_HOUR) for column in MULTI30K_CORE.columns),
)

IWSLT14_CORE = Study(
    id="core.iwslt14",
    title="norms in translation, IWSLT14 De-En",
    rows=(*CORE, *OTHERS),
    note="At pocket scale the training set is a third of the corpus, and the test 1,000 of its 6,750 lines, evenly"
    " spread. Validation perplexity is of 500 lines at every scale.",
    columns=(
        Column(title="BLEU", metric="bleu", base=IWSLT14_UN),
        Column(title="BLEU greedy", metric="bleu running", base=IWSLT14_UN),
        Column(title="greedy, calibrated", metric="bleu calibrated", base=IWSLT14_UN),
        Column(title="valid perplexity", metric="perplexity valid", base=IWSLT14_UN),
    ),
)

CMUDICT_CORE = Study(
    id="core.cmudict",
    title="norms from spelling to sound, CMU Pronouncing Dictionary",
    rows=(*CORE, *OTHERS),
    columns=(
        Column(title="PER", metric="per", base=CMUDICT),
        Column(title="PER greedy", metric="per running", base=CMUDICT),
        Column(title="greedy, statistics of donors of the same lengths", metric="per donors", base=CMUDICT),
        Column(title="greedy, of each test batch itself (until 0.2)", metric="per batch", base=CMUDICT),
        Column(title="greedy, calibrated", metric="per calibrated", base=CMUDICT),
    ),
)

PTB_CORE = Study(
    id="core.ptb",
    title="norms in a tensorized language model, PTB",
    rows=(
        *(row for row in CORE if row.label in ("layer", "batch", "pnv", "power(groups=1)", "un")),
        AUTOMATIC[0],
    ),
    columns=(
        Column(title="test perplexity", metric="perplexity", base=PTB),
        Column(title="valid perplexity", metric="perplexity valid", base=PTB),
        Column(title="test, calibrated", metric="perplexity calibrated", base=PTB),
    ),
)

WIKITEXT2_CORE = Study(
    id="core.wikitext-2",
    title="norms in a language model, WikiText-2",
    rows=tuple(row for row in CORE if row.label in ("layer", "un")),
    columns=(
        Column(title="test perplexity", metric="perplexity", base=WIKITEXT2),
        Column(title="valid perplexity", metric="perplexity valid", base=WIKITEXT2),
    ),
)

NO_WARMUP: dict[str, Settings] = {"gpu": DECAY, "paper": {**DECAY, "lr": 3e-4}}  # pocket keeps its cosine

GALICIAN_CORE = Study(
    id="core.ted-gl",
    title="placement, norm, FixNorm, initial weights and warm-up on little data, TED gl-en (as Tears' Tables 2 to 5)",
    rows=tuple(
        Row(
            label=f"{placement}, {norm}{' + FixNorm' if fixed else ''}, {init}",
            settings={"model.placement": placement, "model.norm": norm, "model.fixnorm": fixed, "model.init": init},
        )
        for placement in ("post", "pre")
        for norm in ("layer", "scale")
        for fixed in (False, True)
        for init in ("xavier", "small")
    ),
    columns=tuple(
        Column(title=f"{title}, {start}", metric=metric, base=TED["gl"], settings=settings, at=at)
        for title, metric in (("BLEU", "bleu"), ("valid perplexity", "perplexity valid"))
        for start, settings, at in (("warm-up", {}, {}), ("none", {"warmup": 0, "lr": Times(0.607)}, NO_WARMUP))
    ),
    note="Without warm-up at 0.607 of the peak rate, as the paper.",
)

GALICIAN_LONG = Study(
    id="core.ted-gl-long",
    title="norms in translation with little data, 10,000 steps, TED gl-en",
    rows=tuple(row for row in MULTI30K_LONG.rows if "shuffled" not in row.label and row.label != "un"),
    columns=(
        Column(title="BLEU", metric="bleu", base=TED_LONG),
        Column(title="BLEU greedy", metric="bleu running", base=TED_LONG),
        Column(title="greedy, calibrated", metric="bleu calibrated", base=TED_LONG),
        Column(title="valid perplexity", metric="perplexity valid", base=TED_LONG),
    ),
)

IMAGES = (
    *(Row(label=norm, settings={"model.norm": norm}) for norm in ("layer", "batch", "mabn", "pnv")),
    Row(label="power(groups=0)", settings={"model.norm": "power(groups=0)"}),
    Row(label="un", settings={"model.norm": "un(outlier_filtration=True)"}),
    Row(label="un, filtration off", settings={"model.norm": "un"}),
)

CIFAR10_CORE = Study(
    id="core.cifar10",
    title="norms in image classification, CIFAR-10: tiny ViT and ResNet-20",
    note="At pocket scale ResNet-20 gets the images at half their size, 16 x 16; at gpu scale the ViT is T2T-ViT-14.",
    rows=IMAGES,
    columns=(
        Column(title="ViT", metric="accuracy", base=CIFAR10),
        Column(title="ViT, calibrated", metric="accuracy calibrated", base=CIFAR10),
        Column(title="ResNet-20", metric="accuracy", base=RESNET20),
        Column(title="ResNet-20, calibrated", metric="accuracy calibrated", base=RESNET20),
    ),
)

RESNET20_LONG = Study(
    id="core.resnet20-hour",
    title="norms in image classification, an hour of one CPU core each, CIFAR-10, ResNet-20",
    rows=tuple(
        Row(label=norm, settings={"model.norm": norm.replace("auto", "'auto'")})
        for norm in (
            "layer", "batch", "pnv", "un(outlier_filtration=True, warmup=auto)", "power(groups=0, warmup=auto)",
            "mabn(warmup=auto)",
        )
    ),
    columns=(
        Column(title="accuracy", metric="accuracy", base=RESNET20_HOUR),
        Column(title="accuracy, calibrated", metric="accuracy calibrated", base=RESNET20_HOUR),
    ),
)  # fmt: skip

CIFAR10_SPEED = Study(
    id="core.cifar10-224",
    title="accuracy and time to accuracy by norm, CIFAR-10 at 224 x 224: T2T-ViT-14 and Swin-T",
    note="Minutes of training until validation accuracy reaches 80%.",
    rows=IMAGES,
    columns=tuple(
        Column(title=f"{name}, {title}", metric=metric, base={"gpu": base["gpu"]})
        for name, base in (("T2T-ViT-14", CIFAR10), ("Swin-T", CIFAR10_SWIN))
        for title, metric in (("accuracy", "accuracy"), ("minutes to 80%", "minutes to 80%"))
    ),
)
