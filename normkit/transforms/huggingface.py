"""Models of Hugging Face in a folder on disk: load, audit, fold, save. Only safetensors, no code from the folder."""

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.norms import Norm, make
from normkit.transforms.audit import Audit, audit
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.fold.fold import Report, fold
from normkit.transforms.fold.rewrite import Affine
from normkit.transforms.layout import channels_first

CHANGES = "normkit.json"  # beside the weights: how the model differs from its architecture
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
LOAD = '''"""Load the folded model of this folder: python -c "import load; model = load.model()". Needs no normkit."""
import inspect
import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file
from torch import nn


def model():
    folder = pathlib.Path(__file__).parent
    changes = json.loads((folder / "normkit.json").read_text())
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])(config)
    for name in changes["norms"]:
        model.set_submodule(name, nn.Identity())
    for name, length in changes["biases"].items():
        owner, key = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), key, nn.Parameter(torch.zeros(length)))
    for name in changes["untied"]:
        module = model.get_submodule(name)
        module.weight = nn.Parameter(module.weight.detach().clone())
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected and all(any(name in group for group in changes["tied"]) for name in missing)
    return model.eval()
'''


class Example(NamedTuple):
    """How to call a model, and what its users read."""

    kwargs: dict[str, Any]
    outputs: Callable[[Any], Any] | None


def is_pretrained_dir(path: Path) -> bool:
    """Whether a folder holds a model of Hugging Face: a config.json that names an architecture."""
    config = path / "config.json"
    return config.is_file() and "architectures" in config.read_text(encoding="utf8")


def load_pretrained_dir(path: Path | str) -> Any:
    """The model of a folder, for inference, with the norms that `save_pretrained_dir` noted beside it.

    ValueError for a folder without config or weights, weights that are pickles (they can run code when loaded),
    an architecture that transformers does not have, code of its own, quantized weights.
    """
    path = Path(path)
    config = _config(path)
    files = _weights(path)
    transformers = _transformers()
    architecture = config["architectures"][0]
    try:
        kind = getattr(transformers, architecture)
    except AttributeError:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no class {architecture}") from None
    except ImportError as problem:
        raise ValueError(f"{path}: transformers cannot import {architecture}: {problem}") from problem
    changes = path / CHANGES
    if not changes.is_file():
        model = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
        return model.eval()
    from safetensors.torch import load_file

    model = _changed(kind(kind.config_class.from_pretrained(path)), json.loads(changes.read_text(encoding="utf8")))
    state = {key: t for file in files for key, t in load_file(file).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not _is_alias(model, name, state)]
    if missing or unexpected:
        raise ValueError(f"{path}: weights do not fit {CHANGES}: missing {missing[:3]}, unexpected {unexpected[:3]}")
    dtypes = {state[name].dtype for name, _ in model.named_parameters() if name in state}
    return (model.to(dtypes.pop()) if len(dtypes) == 1 else model).eval()


def save_pretrained_dir(model: Any, path: Path | str) -> None:
    """Write config, weights as safetensors, and how the model differs from its architecture.

    Where nothing of normkit is left in the model, the folder also gets a `load.py` that needs none to load it.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    changes = _changes(model)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    first: dict[int, str] = {}
    state: dict[str, Tensor] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(t), name) == name:
            state[name] = t.detach().cpu().contiguous().clone()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    (path / CHANGES).write_text(json.dumps(changes, indent=1) + "\n", encoding="utf8")
    if all(change == {"is": "identity"} for change in changes["norms"].values()):
        (path / "load.py").write_text(LOAD, encoding="utf8")


def example_for(model: Any) -> Example:
    """A small random example for a model of Hugging Face, by its configuration and the arguments of its forward.

    ValueError where it takes neither tokens nor an image.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    kwargs: dict[str, Any] = {}
    if "pixel_values" in parameters and "input_ids" not in parameters:
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (2, getattr(config, "num_channels", 3), height, width)
        kwargs["pixel_values"] = torch.randn(shape, generator=generator)
    elif "input_ids" in parameters:
        special = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
        low = min(max([t for t in special if isinstance(t, int)], default=0) + 1, config.vocab_size // 2)
        ids = torch.randint(low, config.vocab_size, (2, 8), generator=generator)
        kwargs.update(input_ids=ids, attention_mask=torch.ones_like(ids))
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = ids[:, :6]
    else:
        raise ValueError(f"{type(model).__name__} takes neither input_ids nor pixel_values; pass an example to fold()")
    with torch.no_grad():
        outputs = _logits if hasattr(model(**kwargs), "logits") else None
    return Example(kwargs, outputs)


def audit_dir(path: Path | str, untie: bool = True) -> Audit:
    """`audit` of the model in a folder."""
    model = load_pretrained_dir(path)
    example = example_for(model)
    return audit(model, outputs=example.outputs, untie=untie, **example.kwargs)


def fold_dir(path: Path | str, out: Path | str, untie: bool = True) -> Report:
    """Fold the model in a folder and write the result to another."""
    path, out = Path(path), Path(out)
    if out.resolve() == path.resolve():
        raise ValueError(f"{out} is the model itself, which is kept; name another folder")
    model = load_pretrained_dir(path)
    example = example_for(model)
    folded, report = fold(model, outputs=example.outputs, untie=untie, **example.kwargs)
    save_pretrained_dir(folded, out)
    return report


def _logits(output: Any) -> Any:
    return output.logits


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"{path} is no folder")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a model of Hugging Face is a folder with config and weights")
    config = json.loads((path / "config.json").read_text(encoding="utf8"))
    if not config.get("architectures"):
        raise ValueError(f"{path}/config.json names no architecture")
    if config.get("auto_map"):
        raise ValueError(f"{path} brings its own code ({', '.join(config['auto_map'].values())}), which is not run")
    if config.get("quantization_config"):
        raise ValueError(f"{path} holds quantized weights; fold the model first, then quantize it")
    return config


def _weights(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path} holds its weights as pickles ({', '.join(pickles[:3])}), which can run code when loaded; they are "
            "refused. Save them as safetensors first: model.save_pretrained(folder)"
        )
    raise ValueError(f"{path} holds no weights; expected *.safetensors beside config.json")


def _transformers() -> Any:
    if "torchvision" not in sys.modules:
        try:
            importlib.import_module("torchvision")
        except ImportError:
            pass
        except RuntimeError:  # a build for another PyTorch, which would take transformers down with it
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        import transformers
    except ImportError as missing:
        raise ImportError("models of Hugging Face need transformers; pip install transformers") from missing
    return transformers


def _fresh(model: Any) -> nn.Module:
    """The architecture of a model, without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _changes(model: Any) -> dict[str, Any]:
    """How a model differs from its architecture: norms, biases that it has more, layers untied."""
    fresh = _fresh(model)
    norms: dict[str, Any] = {}
    biases: dict[str, int] = {}
    for name, there in fresh.named_modules():
        if any(name.startswith(f"{norm}.") for norm in norms):
            continue
        here = model.get_submodule(name)
        if type(here) is not type(there):
            norms[name] = _describe(name, here)
            continue
        for key, value in here._parameters.items():
            if value is not None and there._parameters.get(key) is None:
                biases[f"{name}.{key}"] = value.numel()
    return {"norms": norms, "biases": biases, "untied": _untied(model, fresh), "tied": _ties(model)}


def _describe(name: str, module: nn.Module) -> dict[str, Any]:
    affine = (
        {"weight": module.weight is not None, "bias": getattr(module, "bias", None) is not None}
        if hasattr(module, "weight")
        else {}
    )
    if type(module) is nn.Identity:
        return {"is": "identity"}
    if isinstance(module, Affine):
        width = next(p.numel() for p in module.parameters())
        return {"is": "affine", **affine, "dim": width, "channel_dim": module.channel_dim}
    if isinstance(module, Norm):
        return {"is": module.spec, "dim": module.dim, "channel_dim": getattr(module, "channel_dim", -1)}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is None:
        return {"is": type(module).__name__, "dim": module.normalized_shape[0], "eps": module.eps}
    raise ValueError(
        f"{name} is a {type(module).__name__} in place of what its architecture has; it cannot be saved so"
    )


def _changed(model: Any, changes: dict[str, Any]) -> Any:
    """An architecture with the changes carried out."""
    for name, change in changes["norms"].items():
        model.set_submodule(name, _built(change))
    for name, length in changes["biases"].items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(torch.zeros(length)))
    for name in changes["untied"]:
        module = model.get_submodule(name)
        module.weight = nn.Parameter(module.weight.detach().clone())
    leave_fast_path(model)
    return model


def _built(change: dict[str, Any]) -> nn.Module:
    kind = change["is"]
    if kind == "identity":
        return nn.Identity()
    dim = change["dim"]
    if kind == "affine":
        weight, bias = (torch.ones(dim) if change[key] else None for key in ("weight", "bias"))
        return Affine(weight, bias, change["channel_dim"])
    if kind in ("LayerNorm", "RMSNorm"):
        return getattr(nn, kind)(dim, change["eps"], elementwise_affine=False)
    norm = make(kind, dim)
    return channels_first(norm) if change["channel_dim"] == 1 else norm


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _untied(model: Any, fresh: nn.Module) -> list[str]:
    """Modules whose weight the architecture ties to another's, and this model does not."""
    theirs = [set(group) for group in _ties(fresh)]
    mine = [set(group) for group in _ties(model)]
    apart = {name for group in theirs for name in group if not any(name in other for other in mine)}
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sorted(
        owner for name in apart if (owner := name.removesuffix(".weight")) != name and owner not in embeddings
    )


def _is_alias(model: nn.Module, name: str, state: dict[str, Tensor]) -> bool:
    return any(name in group and any(other in state for other in group) for group in _ties(model))
