"""Models of benchmarks/deploy.py with LayerNorm, UN, and UN folded, and their inputs.

Weights are random unless a folder with trained ones is given; then statistics, gains and biases are random, too: times
do not depend on them.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from normkit_papers.models.torchvision_ops import load_torchvision
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert, load_pretrained
from normkit.norms import StatNorm

NORMS = {"layer": "LayerNorm", "un": "UN", "folded": "UN folded", "limited": "UN folded, spread limited"}


def used(out: Any) -> Any:
    """The part of an output that is used; a norm whose output is used stays."""
    return out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out.last_hidden_state


@dataclass
class Subject:
    """A model with LayerNorm and how to call it.

    Attributes:
        model: The model with LayerNorm.
        inputs: `inputs(batch)` makes keyword arguments.
        un: The model with UN; by default converted, with random statistics.
        calibration: `calibration(batch)` makes calibration batches; by default four of `inputs`.
        spread: Limit of the variant "limited"; None where there is none.
    """

    model: nn.Module
    inputs: Callable[[int], dict[str, Tensor]]
    un: nn.Module | None = None
    calibration: Callable[[int], list[dict[str, Tensor]]] | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        self.model.eval()
        self.variant = functools.cache(self.variant)

    def batches(self, batch: int) -> list[dict[str, Tensor]]:
        """Calibration batches."""
        return self.calibration(batch) if self.calibration else [self.inputs(batch) for _ in range(4)]

    def variant(self, norm: str) -> tuple[nn.Module, str]:
        """The model with one of NORMS, and what was folded."""
        if norm == "layer":
            return self.model, ""
        if self.un is None:
            self.un = with_random_statistics(self.model)
        if norm == "un":
            return self.un, ""
        limits: dict[str, Any] = {"spread": self.spread, "balance": self.batches(1)} if norm == "limited" else {}
        folded, report = fold(self.un, outputs=used, other_shapes=False, **limits, **self.inputs(1))
        left = [f"{report.count(action)} {action}" for action in ("multiply-add", "add") if report.count(action)]
        return folded, f"{report.foldable} norms folded{''.join(f', {each}' for each in left)}"


def with_random_statistics(model: nn.Module) -> nn.Module:
    """The model with UN in place of LayerNorm."""
    un = convert(model, "un").eval()
    with torch.no_grad():
        for module in un.modules():
            if isinstance(module, StatNorm):
                module.running.uniform_(0.5, 1.5)
    return un


def bert(weights: Path | None, **sizes: int) -> Subject:
    """BERT with random weights, post-norm."""
    import transformers as hf

    tokens = sizes.pop("tokens")
    model = hf.BertModel(hf.BertConfig(**sizes), add_pooling_layer=False)
    return Subject(model, lambda batch: {"input_ids": torch.randint(5, 30000, (batch, tokens))})


def minilm(weights: Path | None) -> Subject:
    """all-MiniLM-L6-v2 on 64 tokens; `weights/layer` is the original, `weights/un` has UN.

    The latter is OUT/unfolded of `normkit remove-norms layer --text wikitext-2 --steps 2400 --unfolded --out OUT`.
    """
    import minilm as real
    from transformers import AutoModel, AutoTokenizer

    if weights is None:
        raise ValueError(
            "minilm needs --weights FOLDER with layer/ (the original) and un/ (by remove-norms --unfolded)"
        )
    tokenizer = AutoTokenizer.from_pretrained(weights / "layer")
    texts = real.passages(128)

    def batch(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt"))

    model = AutoModel.from_pretrained(weights / "layer", add_pooling_layer=False)
    un = load_pretrained(weights / "un")
    un.pooler = None  # not used
    return Subject(
        model,
        lambda size: batch(texts[:size]),
        un.eval(),
        lambda size: [batch(texts[i : i + size]) for i in range(64, 128, size)],
        spread=4,
    )


def vit(weights: Path | None) -> Subject:
    """ViT-S/16 of timm, pictures of 224."""
    import timm

    return pictures(timm.create_model("vit_small_patch16_224"))


def swin(weights: Path | None) -> Subject:
    """Swin-T of timm, pictures of 224."""
    import timm

    return pictures(timm.create_model("swin_tiny_patch4_window7_224"))


def pictures(model: nn.Module) -> Subject:
    """A classifier of pictures of 224 x 224."""
    return Subject(model, lambda batch: {"x": torch.randn(batch, 3, 224, 224)})


def gpt2(weights: Path | None) -> Subject:
    """GPT-2 small, one token with an empty cache."""
    import transformers as hf

    model = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, bos_token_id=1, eos_token_id=1))
    return Subject(model, lambda batch: {"input_ids": torch.randint(5, 50000, (batch, 1))})


def run_folders(weights: Path | None, name: str) -> Subject:
    """A trained sequence-to-sequence model: `weights/NAME-layer` and `weights/NAME-un`."""
    from normkit_papers.train.folder import load

    if weights is None:
        raise ValueError(f"{name} needs --weights FOLDER with {name}-layer and {name}-un, run folders of normkit train")
    layer, un = (load(weights / f"{name}-{norm}") for norm in ("layer", "un"))
    source, target = (len(layer.vocabularies[side]) for side in ("source", "target"))

    def inputs(batch: int) -> dict[str, Tensor]:
        return {"source": torch.randint(4, source, (batch, 16)), "target": torch.randint(4, target, (batch, 16))}

    return Subject(layer.model.eval(), inputs, un.model.eval())


MODELS: dict[str, tuple[str, Callable[[Path | None], Subject]]] = {
    "bert6": (
        "BERT, 6 layers of 384, 64 tokens, post-norm",
        lambda weights: bert(
            weights, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, tokens=64
        ),
    ),
    "minilm": ("all-MiniLM-L6-v2, 64 tokens, post-norm, trained weights", minilm),
    "vit": ("ViT-S/16", vit),
    "swin": ("Swin-T", swin),
    "bert": ("BERT-base, 128 tokens, post-norm", lambda weights: bert(weights, tokens=128)),
    "gpt2": ("GPT-2 small, one token", gpt2),
    "tiny": (
        "a tiny BERT, for tests",
        lambda weights: bert(
            weights, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, tokens=8
        ),
    ),
    "g2p": ("our spelling to sound, pre-norm, trained", lambda weights: run_folders(weights, "g2p")),
    "g2p-post": ("our spelling to sound, post-norm, trained", lambda weights: run_folders(weights, "g2p-post")),
    "multi30k": ("our translation model, pre-norm, trained", lambda weights: run_folders(weights, "multi30k")),
}


def make(name: str, weights: Path | None = None) -> Subject:
    """A model of MODELS, the same each time."""
    load_torchvision()
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).parent))
    return MODELS[name][1](weights)
