"""Save and load models of Hugging Face in folders.

Weights are read from safetensors only, and code in a folder is not run.
"""

import importlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from normkit._util import as_path
from normkit.models.affine import Affine
from normkit.models.checks import needs
from normkit.models.first_token import Clamp, begin, put_first_token
from normkit.models.model_changes import KEY, apply_changes, build, full_name, rebuild, save_buffer, write_changes
from normkit.models.take_apart import GatedNorm

VARIANT = "normkit"  # of the weight files: from_pretrained fails for want of any, where it would build other norms
WEIGHTS = re.compile(r"model(\.normkit)?(-\d+-of-\d+)?\.safetensors(\.index(\.normkit)?\.json)?")  # file names
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
STANDARD = {"identity", "affine", "LayerNorm", "RMSNorm", "clamped norm", "clamped"}
"""What load.py can put in the place of a norm."""
LOADS = (Affine, Clamp, begin, put_first_token, full_name, save_buffer, build, apply_changes)  # the code of load.py
LOADING = {"local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
AUTO_CLASS = "load.Folded"  # in config.json, for trust_remote_code=True
CARD = re.compile(r"(---\n.*?\n---\n+)(.*)", re.DOTALL)  # metadata, text
NOT_COPIED = (
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf", "*.h5", "*.msgpack",
    "*.onnx", "*.onnx_data", "*.py", "config.json", ".*",
)  # fmt: skip
LOAD = '''"""Load the folded model of this folder: python -c "import load; model = load.model()". Needs no normkit.

AutoModel and SentenceTransformer run this file with trust_remote_code=True.
"""

import functools
import inspect
import pathlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations
from transformers import ARCHITECTURE as Architecture


FUNCTIONS


class Folded(Architecture):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        apply_changes(self, config.normkit)

    @classmethod
    def from_pretrained(cls, folder, *args, **kwargs):
        kwargs.update(variant="normkit", use_safetensors=True, output_loading_info=True)
        model, found = super().from_pretrained(folder, *args, **kwargs)
        if problems := [*found["missing_keys"], *found["unexpected_keys"]]:
            raise ValueError(f"the weights do not fit: {problems}")
        model.__class__ = Architecture
        model.save_pretrained = functools.partial(save, model)
        return model


def save(model, folder, *args, **kwargs):
    """Write a folder like this one: no other class opens its weights by mistake."""
    Architecture.save_pretrained(model, folder, *args, **{"variant": "normkit", **kwargs})
    (pathlib.Path(folder) / "load.py").write_bytes(pathlib.Path(__file__).read_bytes())


Folded.__name__, Folded.__module__ = Architecture.__name__, Architecture.__module__  # transformers renames weights by


def model():
    return Folded.from_pretrained(pathlib.Path(__file__).parent, local_files_only=True)
'''


def save_pretrained(model: Any, folder: Path | str) -> None:
    """Save a model of Hugging Face with its norms, as configuration and safetensors.

    The specs of the norms go into `config.json`, statistics are among the weights. `load_pretrained` restores both.
    `from_pretrained` of transformers would build the original norms. So that it fails instead, the weight files of a
    model that differs from its architecture are named `model.normkit.safetensors`. A folded model gets a `load.py`,
    which loads it without normkit; `from_pretrained(folder, trust_remote_code=True)` of its Auto class runs it, and so
    does sentence-transformers. A model of its architecture, such as one after `fold(keep_architecture=True)`, is a
    plain checkpoint, which needs none.

    Args:
        model: A `PreTrainedModel`, usually after `convert`, `to_rms` or `fold`.
        folder: Folder to write, created where it is missing.

    Raises:
        TypeError: If the model is not one of transformers.
        ValueError: If normkit cannot rebuild a module, or the folder holds other weights.
    """
    folder = as_path(folder, "folder")
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        kind = type(model).__name__
        raise TypeError(f"save_pretrained() takes a model of transformers; got {kind}. Save its state_dict() instead")
    if folder.exists() and not folder.is_dir():  # transformers would log a message, and save nothing
        raise ValueError(f"{folder} is a file; name a folder")
    changes = write_changes(model)
    if other := [file.name for file, variant in _weights(folder).items() if (variant is None) == bool(changes)]:
        raise ValueError(f"{folder} holds other weights ({', '.join(other[:3])}); name another folder")
    gated = any(isinstance(module, GatedNorm) for module in model.modules())  # which is of normkit
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as new:  # the old files stay if the disk is full
        with quiet(import_transformers()):
            model.save_pretrained(new, variant=VARIANT if changes else None)
        for file in Path(new).glob("*.safetensors"):  # written for the user alone
            file.chmod(Path(new, "config.json").stat().st_mode)
        kinds = {change.get("then", change)["is"] for change in changes["norms"].values()} if changes else set()
        loads = bool(changes) and not gated and kinds <= STANDARD
        _set_auto_class(Path(new, "config.json"), loads)
        if loads:
            functions = "\n\n\n".join(inspect.getsource(each).rstrip() for each in LOADS)
            text = LOAD.replace("ARCHITECTURE", type(model).__name__).replace("FUNCTIONS", functions)
            Path(new, "load.py").write_text(text, encoding="utf8")
        replaced = [file for file in folder.glob("model*") if WEIGHTS.fullmatch(file.name)]
        if (script := folder / "load.py").is_file() and script.read_text("utf8").startswith(LOAD.splitlines()[0]):
            replaced.append(script)  # of the model before
        for file in replaced:
            file.unlink()
        for file in sorted(Path(new).iterdir()):  # weights last: without them nothing loads
            file.replace(folder / file.name)


def copy_small_files(path: Path, out: Path) -> None:
    """Copy tokenizer, chat template and other small files beside config and weights.

    Of the folders inside, those that `modules.json` names are copied, with their weights. The model card says that it
    is the original's.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(path.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, out / file.name)
    if (card := out / "README.md").is_file():
        text = card.read_text(encoding="utf8", errors="replace")
        metadata, text = match.groups() if (match := CARD.fullmatch(text)) else ("", text)
        told = f"> normkit changed the norms of this model. Below is the card of the original, `{path.resolve().name}`."
        card.write_text(f"{metadata}{told}\n\n{text}", encoding="utf8")
    if (modules := path / "modules.json").is_file():
        for name in (module["path"] for module in json.loads(modules.read_text(encoding="utf8"))):
            if name and Path(name).name == name and (path / name).is_dir():
                shutil.copytree(path / name, out / name, dirs_exist_ok=True)


def _set_auto_class(path: Path, loads: bool) -> None:
    """Name `load.py` in a `config.json` for the auto classes of the architecture, or remove its name."""
    config = json.loads(path.read_text(encoding="utf8"))
    config.pop("auto_map", None)
    if loads:
        kind, architecture = config["model_type"], config["architectures"][0]
        autos = vars(importlib.import_module("transformers.models.auto.modeling_auto")).items()
        found = []
        for name, auto in autos:
            if name.startswith("AutoModel") and getattr(auto, "_model_mapping", None) is not None:
                names = auto._model_mapping._model_mapping.get(kind, ())
                found += [name] * (architecture in ([names] if isinstance(names, str) else names))
        config["auto_map"] = dict.fromkeys(found, AUTO_CLASS)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def load_pretrained(folder: Path | str) -> Any:
    """Load a model of Hugging Face with its norms, in evaluation mode.

    The folder is one that `save_pretrained` of normkit wrote, a checkpoint of `Trainer`, or one that `save_pretrained`
    of transformers wrote, of a converted or of an unchanged model.

    Args:
        folder: Folder with `config.json` and safetensors. Nothing is downloaded.

    Returns:
        The model, of its class in transformers, with the dtype it was saved in.

    Raises:
        ValueError: If a weight is missing, left over or of another shape; if the folder has no configuration or no
            weights, weights only as pickles, code of its own, or quantized weights; if transformers does not have
            the architecture.
    """
    path = as_path(folder, "folder")
    config = read_config(path)
    variant = _only_variant(path)
    transformers, kind = transformers_class(path, config)
    from safetensors import SafetensorError, safe_open  # transformers needs it

    for file in _weights(path):
        try:
            safe_open(file, "pt")
        except SafetensorError as problem:  # it does not name the file
            raise ValueError(f"{file} is cut short or damaged: {problem}") from problem
    changes = config.get(KEY)

    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        if changes is not None:
            rebuild(self, changes)

    # a subclass, so that transformers itself reads shards, renames and converts weights, and ties them
    changed = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    given = {"pretrained_model_name_or_path": path, "variant": variant, "use_safetensors": True}
    model = open_model(path, transformers, lambda: changed.from_pretrained(**given, **LOADING), changes is not None)
    model.__class__ = kind
    if changes is not None:
        write_changes(model)
    return model


def open_model(path: Path, transformers: Any, load: Callable[[], tuple[Any, Any]], recorded: bool = False) -> Any:
    """Return the model that `load` makes of a folder; a ValueError unless the weights fit it."""
    try:
        with quiet(transformers):
            model, found = load()
    except Exception as problem:  # what a damaged configuration raises depends on the class
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        raise ValueError(f"{path}: {kind}{problem}") from problem
    _check_fit(path, found, recorded)
    return model


def transformers_class(path: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers, and its class for the model of a folder; a ValueError if it has none."""
    transformers, architecture = import_transformers(), config["architectures"][0]
    try:
        return transformers, getattr(transformers, architecture)
    except ImportError as error:
        raise ValueError(f"{path}: transformers cannot import {architecture}: {error}") from error
    except AttributeError as error:
        version = f"transformers {transformers.__version__}"
        raise ValueError(f"{path}: {version} has no {architecture}; install a version that has it") from error


def read_config(path: Path) -> dict[str, Any]:
    """Read the configuration of a folder; a ValueError if the folder cannot be loaded by it."""
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder of a Hugging Face model. Others fold in Python: nk.fold")
    if not path.is_dir():
        get = f"; get a model of the Hub as a folder: hf download {path} --local-dir {path.name}"
        raise ValueError(f"{path} is no folder{get if HUB_NAME.fullmatch(path.as_posix()) else ''}")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a model of Hugging Face is a folder with config and weights")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}/config.json is cut short or not JSON: {error}; get the model again") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ValueError(f"{path}/config.json names no architecture")
    if config.get("auto_map") and not (KEY in config and {*config["auto_map"].values()} == {AUTO_CLASS}):
        raise ValueError(f"{path} brings its own code ({', '.join(config['auto_map'].values())}), which is not run")
    if config.get("quantization_config"):
        raise ValueError(f"{path} holds quantized weights; fold the model first, then quantize it")
    return config


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a folder; a ValueError if there are none, or those of two models."""
    _only_variant(path)
    return [*_weights(path)]


def _weights(path: Path) -> dict[Path, str | None]:
    """Return the weight files of a folder, each with its variant in the sense of transformers."""
    return {f: VARIANT if VARIANT in f.name.split(".") else None for f in sorted(path.glob("model*.safetensors"))}


def _only_variant(path: Path) -> str | None:
    """Return the variant of the weight files of a folder."""
    weights = _weights(path)
    if len({*weights.values()}) > 1:
        names = ", ".join(file.name for file in weights)
        raise ValueError(f"{path} holds weights of two models ({names}); remove those that are out of date")
    if weights:
        return next(iter(weights.values()))
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        held = f"holds its weights as pickles ({', '.join(pickles[:3])}), which can run code and are refused"
        raise ValueError(f"{path} {held}; save them as safetensors first: model.save_pretrained(folder)")
    raise ValueError(f"{path} holds no weights; expected model.safetensors beside config.json")


def _check_fit(path: Path, found: Mapping[str, Any], recorded: bool) -> None:
    """Raise a ValueError that names tensors unless a checkpoint fits its model exactly."""
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    shapes = sorted(f"{name} {list(saved)}, not {list(built)}" for name, saved, built in found["mismatched_keys"])
    missing = [name for name in missing if name not in {entry[0] for entry in found["mismatched_keys"]}]
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:4])}{' ...' if len(names) > 4 else ''})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if not parts:
        return
    advice = ""
    if not recorded and any(name.endswith(".running") for name in unexpected):
        advice = f". They hold statistics, but config.json has no key {KEY!r}: save with normkit.save_pretrained"
    raise ValueError(f"{path}: weights do not fit the model: {'; '.join(parts)}{advice}")


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Hold back progress bars, and warnings about misfits, which are errors here."""
    library = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


def import_transformers() -> Any:
    """Import transformers, also where torchvision was built for another PyTorch and fails."""
    if "torchvision" not in sys.modules:
        try:
            importlib.import_module("torchvision")
        except ImportError:
            pass
        except RuntimeError:  # models of text do without; see "Troubleshooting" in the documentation
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    with needs("a model of Hugging Face", "huggingface"):
        import transformers
    return transformers
