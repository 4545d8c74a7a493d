"""The model of a run, from its settings and vocabularies alone, so that a run can be loaded without its data."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normkit.lab.data.vocab import BOS, SPECIAL, Vocab
from normkit.lab.models.classifiers import classifier
from normkit.lab.models.config import Model
from normkit.lab.models.detection import detector
from normkit.lab.models.lm import DecoderLM
from normkit.lab.models.mt import Seq2Seq
from normkit.lab.models.vit import TinyViT

Vocabularies = Mapping[str, Vocab]


class Builder(NamedTuple):
    """How a task's model is made, and an input of the kind that it takes, or that its part takes that has the norms."""

    model: Callable[[Model, Vocabularies], nn.Module]
    example: Callable[[Model, Vocabularies], tuple[Tensor, ...]]
    part: str = ""


def seq2seq(config: Model, vocabularies: Vocabularies) -> Seq2Seq:
    """Encoder and decoder over a source and a target vocabulary."""
    return Seq2Seq(config, len(vocabularies["source"]), len(vocabularies["target"]))


def lm(config: Model, vocabularies: Vocabularies) -> DecoderLM:
    """A language model over words."""
    return DecoderLM(config, len(vocabularies["words"]))


def vit(config: Model, vocabularies: Vocabularies) -> TinyViT:
    """A Vision Transformer for grey pictures of 8 x 8, in patches of 2 x 2."""
    classes = len(vocabularies["classes"]) - len(SPECIAL)
    return TinyViT(config, image_size=8, patch=2, channels=1, classes=classes)


def detection(config: Model, vocabularies: Vocabularies) -> nn.Module:
    """The detector of `config.arch`."""
    return detector(config, len(vocabularies["classes"]) - len(SPECIAL))


def _words(vocab: Vocab, seed: int, rows: int = 4, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), len(vocab), (rows, length), generator=generator)


def pictures(config: Model, vocabularies: Vocabularies) -> nn.Module:
    """A classifier of the table of models, for pictures in colour."""
    return classifier(config, len(vocabularies["classes"]) - len(SPECIAL))


def _noise(rows: int, channels: int, size: int) -> tuple[Tensor, ...]:
    return (torch.rand(rows, channels, size, size, generator=torch.Generator().manual_seed(0)),)


def _sentence_pairs(config: Model, vocabularies: Vocabularies) -> tuple[Tensor, Tensor]:
    target = _words(vocabularies["target"], 1)
    target[:, 0] = BOS
    return _words(vocabularies["source"], 0), target


BUILDERS: dict[str, Builder] = {
    "g2p": Builder(seq2seq, _sentence_pairs),
    "mt": Builder(seq2seq, _sentence_pairs),
    "lm": Builder(lm, lambda config, vocabularies: (_words(vocabularies["words"], 0),)),
    "digits": Builder(vit, lambda config, vocabularies: _noise(4, 1, 8)),
    "images": Builder(pictures, lambda config, vocabularies: _noise(4, 3, config.image_size)),
    "detection": Builder(detection, lambda config, vocabularies: _noise(1, 3, 64), part="backbone"),
}
"""By task, as TASKS."""
