"""Build the model of a run, and an input for it, from its settings and vocabularies, without its data."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normkit._util import pick
from normkit_papers.data.vocab import BOS, SPECIAL, Vocab
from normkit_papers.models.classifiers import TinyViT, classifier
from normkit_papers.models.config import Model
from normkit_papers.models.detection import detector
from normkit_papers.models.lm import LSTMLM, DecoderLM
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.tasks import TASKS
from normkit_papers.train.config import Run

Vocabularies = Mapping[str, Vocab]


def build_model(task: str, config: Model, vocabularies: Vocabularies) -> nn.Module:
    """Build the model of a task.

    Raises:
        ValueError: If the task is unknown, a vocabulary is missing, or the model does not fit into memory.
    """
    build = pick(TASKS, task, "task").load("model")
    try:
        return build(config, vocabularies)
    except KeyError as error:
        raise ValueError(f"a model of task {task} needs a vocabulary {error}; got {sorted(vocabularies)}") from None
    except (MemoryError, OverflowError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"a model of these sizes cannot be built ({reason}); lower model.width, depth, max_length or "
                         "the windows of norms") from None  # fmt: skip


def seq2seq(config: Model, vocabularies: Vocabularies) -> Seq2Seq:
    """Build an encoder and decoder over a source and a target vocabulary."""
    if config.share and vocabularies["source"].symbols != vocabularies["target"].symbols:
        raise ValueError("share=True needs one vocabulary; source and target have different symbols")
    return Seq2Seq(config, len(vocabularies["source"]), len(vocabularies["target"]))


def language_model(config: Model, vocabularies: Vocabularies) -> DecoderLM | LSTMLM:
    """Build the language model `config.arch`; a Transformer decoder if that is empty."""
    build: dict[str, type[DecoderLM | LSTMLM]] = {"": DecoderLM, "lstm": LSTMLM}
    return pick(build, config.arch, "language model")(config, len(vocabularies["words"]))


def digit_classifier(config: Model, vocabularies: Vocabularies) -> TinyViT:
    """Build a Vision Transformer for grey images of 8 x 8 pixels, in patches of 2 x 2."""
    return TinyViT(config, image_size=8, patch=2, channels=1, classes=_classes(vocabularies))


def image_classifier(config: Model, vocabularies: Vocabularies) -> nn.Module:
    """Build the classifier `config.arch` for colour images."""
    return classifier(config, _classes(vocabularies))


def object_detector(config: Model, vocabularies: Vocabularies) -> nn.Module:
    """Build the detector `config.arch`."""
    return detector(config, _classes(vocabularies))


def example_input(run: Run, vocabularies: Vocabularies) -> tuple[Tensor, ...]:
    """Return a random input for a run's model, or for the part of it that has the norms."""
    if "source" in vocabularies:
        target = _words(vocabularies["target"], 1)
        target[:, 0] = BOS
        return _words(vocabularies["source"], 0), target
    if "words" in vocabularies:
        return (_words(vocabularies["words"], 0),)
    size = run.model.image_size
    shape = {"digits": (4, 1, 8, 8), "detection": (1, 3, 64, 64)}.get(run.task, (4, 3, size, size))
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)),)


def _classes(vocabularies: Vocabularies) -> int:
    return len(vocabularies["classes"]) - len(SPECIAL)


def _words(vocab: Vocab, seed: int) -> Tensor:
    return torch.randint(len(SPECIAL), len(vocab), (4, 9), generator=torch.Generator().manual_seed(seed))
