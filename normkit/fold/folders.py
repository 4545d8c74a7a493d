"""Audit and fold the model in a Hugging Face folder, for the commands."""

import inspect
from pathlib import Path
from typing import Any

import torch

from normkit.fold import audit, fold
from normkit.fold.checkpoints import Checkpoint, audit_checkpoint, doubtful_gains, fold_checkpoint
from normkit.fold.report import Audit, Report
from normkit.models import find
from normkit.models.huggingface import copy_small_files, load_pretrained, read_config, save_pretrained
from normkit.models.model_changes import KEY

TWO_TOWERS = ("clip", "siglip", "chinese_clip", "altclip")  # types of models that take a text and an image


def example_for(model: Any, path: Path | None = None) -> dict[str, Any]:
    """Make a small random example for a model of Hugging Face from its configuration.

    Args:
        model: The model.
        path: Its folder. If sentence-transformers opens that, which uses the model without its head, the last hidden
            states are kept, too.

    Returns:
        Arguments of `fold` and `audit`: those of the model, and `outputs`, which picks the relevant output.

    Raises:
        ValueError: If the model takes neither tokens nor an image, or needs more.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    kwargs: dict[str, Any] = {}
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in parameters and ("input_ids" not in parameters or config.model_type in TWO_TOWERS):
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (2, getattr(vision, "num_channels", 3), height, width)
        kwargs["pixel_values"] = torch.randn(shape, generator=generator)
    if "input_ids" in parameters:
        text = config.get_text_config()  # of a model that reads images, too
        special = [getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
        low = min(max([t for t in special if isinstance(t, int)], default=0) + 1, text.vocab_size // 2)
        ids = torch.randint(low, text.vocab_size, (2, 8), generator=generator)
        kwargs.update(input_ids=ids, attention_mask=torch.ones_like(ids))
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = ids[:, :6]
            if "Classification" in type(model).__name__:  # which reads the state at the end of the encoder's text
                ids[:, -1] = text.eos_token_id
                kwargs["decoder_input_ids"] = ids
    if not kwargs:
        name = type(model).__name__
        raise ValueError(
            f"{name} takes neither input_ids nor pixel_values; in Python pass an example: nk.fold(model, ...)"
        )
    headed = model.base_model is not model and not config.is_encoder_decoder
    if path is not None and (path / "modules.json").is_file() and headed:
        return {**kwargs, "output_hidden_states": True, "outputs": _logits_and_states}
    return {**kwargs, "outputs": _logits}


def _logits(output: Any) -> Any:
    """The logits of what a model returns, or all of it."""
    return getattr(output, "logits", output)


def _logits_and_states(output: Any) -> Any:
    return _logits(output), output.hidden_states[-1]


def audit_dir(path: Path | str) -> tuple[Audit, list[str]]:
    """Report what `fold_dir` does with a folder; also return warnings about stored gains."""
    path = Path(path)
    if (plain := open_plain(path)) is not None:
        return audit_checkpoint(plain, example_for(plain.model, path)), doubtful_gains(plain.model)
    model = load_pretrained(path)
    return audit(model, **example_for(model, path), keep_architecture=False), doubtful_gains(model)


def fold_dir(path: Path | str, out: Path | str, untie: bool = False) -> Report:
    """Fold the model in a folder and write the result to another folder.

    Args:
        path: Folder of a Hugging Face model. If transformers saved it and its norms compute statistics, the result is
            a checkpoint of the same architecture, and the weights are read and written one by one.
        out: Folder for the result.
        untie: Give an output layer that is tied to an embedding a copy of its own.

    Returns:
        The report of `fold`.
    """
    path, out = Path(path), Path(out)
    if out.resolve() == path.resolve():
        raise ValueError(f"{out} is the model itself, which is kept; name another folder")
    if (plain := open_plain(path)) is not None:
        return fold_checkpoint(plain, example_for(plain.model, path), out, untie)
    model = load_pretrained(path)
    folded, report = fold(model, untie=untie, **example_for(model, path))
    save_pretrained(folded, out)
    copy_small_files(path, out)
    return report


def open_plain(path: Path) -> Checkpoint | None:
    """Open a folder that transformers saved; None if its norms are other ones, or have frozen statistics."""
    if KEY in read_config(path):
        return None
    checkpoint = Checkpoint(path)
    offline = any(found.running is not None for found in find(checkpoint.model).values())
    return None if offline else checkpoint
