"""What the studies' columns start from: by corpus and model, then by scale.

A corpus that has no recipe at some scale has no entry there, or names a recipe that is yet to come: its columns show
the paper's figures and "not yet run".
"""

from normkit.studies.study import Base

Bases = dict[str, Base]


def _bases(name: str, **recipes: str | tuple[str, dict]) -> Bases:
    """One base a scale: a recipe, or a recipe and what is different."""
    pairs = {scale: (given, {}) if isinstance(given, str) else given for scale, given in recipes.items()}
    return {scale: Base(name, *pair) for scale, pair in pairs.items()}


MULTI30K = _bases("multi30k.de-en", pocket="mt_multi30k")
IWSLT14 = _bases("iwslt14.de-en", pocket="mt_iwslt14_pocket", gpu=("mt_iwslt14", {"steps": 8000}), paper="mt_iwslt14")
IWSLT14_UN = _bases(
    "iwslt14.de-en.un", pocket="mt_iwslt14_pocket", gpu=("mt_iwslt14_un", {"steps": 8000}), paper="mt_iwslt14_un"
)
IWSLT15_VI = _bases("iwslt15.en-vi", paper="mt_iwslt15_en_vi")
TED = {
    "gl": _bases("ted.gl", pocket="mt_ted_gl_pocket", gpu="mt_ted_gl", paper="mt_ted_gl"),
    "sk": _bases("ted.sk", paper="mt_ted_sk"),
    "he": _bases("ted.he", paper="mt_ted_he"),
    "ar": _bases("ted.ar", paper="mt_ted_ar"),
}
WMT14_DE = _bases("wmt14.en-de", paper="mt_wmt14_en_de")
WMT14_DE_BIG = _bases("wmt14.en-de.big", paper="mt_wmt14_en_de_big")
WMT14_FR = _bases("wmt14.en-fr", paper="mt_wmt14_en_fr")
PTB = _bases("ptb", pocket="lm_ptb_pocket", gpu=("lm_ptb", {"steps": 6000}), paper="lm_ptb")
WIKITEXT103 = _bases("wikitext-103", paper="lm_wikitext103")
CMUDICT = _bases("cmudict", pocket=("g2p_cmudict", {"steps": 3600, "warmup": 360}))
VISION: Bases = {}
"""Pictures: T2T-ViT, Swin, detectors; no recipe yet."""
