"""Fold checkpoints of Hugging Face models from folder to folder, in little memory.

The weights are read tensor by tensor, and written with the names, shapes, types and shards of the original folder. Its
own class in transformers opens the result, and so does every other program that opens the original.
"""

import copy
import json
import math
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import listed
from normkit.fold.fold import find_plan
from normkit.fold.plan import FoldPlan
from normkit.fold.report import Audit, Report
from normkit.fold.rewrite import Edit, find_edits, largest_factor
from normkit.fold.survey import Survey
from normkit.models.convert import find
from normkit.models.huggingface import (
    LOADING,
    copy_small_files,
    open_model,
    read_config,
    transformers_class,
    weight_files,
)
from normkit.models.invoke import Call
from normkit.models.lazy import Lazy, blocks, in_float64, is_large, only_moving

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NEAR = 0.1  # mean difference up to which gains are near a number


@dataclass(eq=False)
class Stored:
    """A tensor in a file of safetensors; `stand_in` is read in its place, if there is one."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    stand_in: Tensor | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Its type in PyTorch."""
        return TYPES[self.type]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Read a range of rows."""
        if self.stand_in is not None:
            return self.stand_in[rows] if self.shape else self.stand_in
        shape, first = self.shape, 0
        if shape:
            first, last, _ = rows.indices(shape[0])
            shape = (max(0, last - first), *shape[1:])
        row = math.prod(shape[1:]) * self.dtype.itemsize
        numbers = torch.empty(shape, dtype=self.dtype)
        if numbers.numel():
            with self.file.open("rb") as file:
                file.seek(self.start + first * row)
                file.readinto(numbers.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        return numbers

    def lazy(self) -> Lazy:
        """The tensor, read where it is used."""
        return Lazy(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.read)


class Checkpoint:
    """A folder with the configuration and the safetensors of a model of Hugging Face.

    Args:
        path: Folder with `config.json` and safetensors. Nothing is downloaded, and no code in it is run.

    Attributes:
        config: The contents of `config.json`.
        model: The model in evaluation mode. Its large weights are read where they are used.
        read: The reading of each of its parameters and buffers that comes from a file.
        shards: The tensors of each weight file.
        metadata: The metadata of each weight file.

    Raises:
        ValueError: If it is no folder, or has no configuration, code of its own, quantized weights, weights only as
            pickles; if a shard is missing, cut short or damaged; if transformers does not have the architecture, or the
            weights do not fit it.
    """

    def __init__(self, path: Path):
        self.path, self.config = path, read_config(path)
        self.indexed = (path / INDEX).is_file()
        if self.indexed:
            names = sorted({*_json(path / INDEX).get("weight_map", {}).values()})
            if missing := [name for name in names if not (path / name).is_file()]:
                raise ValueError(f"{path} lacks {', '.join(missing[:3])}, which {INDEX} names; get the shards again")
        else:
            names = [file.name for file in weight_files(path)]  # an error without any
            if names != [SINGLE]:
                raise ValueError(f"{path} holds {', '.join(names[:3])}; expected {SINGLE}, or shards and {INDEX}")
        self.metadata: dict[str, dict[str, str]] = {}
        self.shards: dict[str, list[Stored]] = {}
        for name in names:
            self.shards[name], self.metadata[name] = read_header(path / name)

        self.model, self.read = self._model()

    def __iter__(self) -> Iterator[Stored]:
        return (stored for shard in self.shards.values() for stored in shard)

    def _model(self) -> tuple[Any, dict[str, Lazy]]:
        """Build the model, and name what is read from files."""
        transformers, kind = transformers_class(self.path, self.config)

        def load() -> Any:
            config = kind.config_class.from_pretrained(self.path, local_files_only=True)
            state = {stored.name: stored.lazy() for stored in self}
            return kind.from_pretrained(None, config=config, state_dict=state, dtype="auto", **LOADING)

        model = open_model(self.path, transformers, load)
        read = {name: t for name, t in _tensors(model) if isinstance(t, Lazy)}
        small = {id(t): _held(t) for t in read.values() if not is_large(t)}
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                own |= {key: small[id(t)] for key, t in own.items() if id(t) in small}
        return model.eval(), read


def read_header(file: Path) -> tuple[list[Stored], dict[str, str]]:
    """Read what a file of safetensors holds: its tensors in their order, and its metadata.

    Raises:
        ValueError: If the file is cut short or damaged, or has types that are not known.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8))[0]
            if length > size - 8:
                raise ValueError(f"its header has {length:,} bytes")
            header = json.loads(opened.read(length))
        metadata = header.pop("__metadata__", None) or {}
        begin = 8 + length
        found = [Stored(name, file, each["dtype"], tuple(each["shape"]), begin + each["data_offsets"][0])
                 for name, each in header.items()]  # fmt: skip
        end = max((begin + each["data_offsets"][1] for each in header.values()), default=begin)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
        raise ValueError(f"{file} is cut short or damaged ({problem}); get it again") from problem
    if end > size:
        raise ValueError(f"{file} is cut short: it has {size:,} of {end:,} bytes; get it again")
    if other := sorted({each.type for each in found} - TYPES.keys()):
        raise ValueError(f"{file} holds tensors of type {', '.join(other)}; fold the model before it is quantized")
    return sorted(found, key=lambda each: each.start), metadata


def fold_checkpoint(checkpoint: Checkpoint, example: dict[str, Any], out: Path, untie: bool = False) -> Report:
    """Fold the gains of a checkpoint into the next layers, and write it in the same architecture.

    Args:
        checkpoint: The original.
        example: Arguments of the model, and `outputs`, as for `fold`.
        out: Folder to write. It appears when it is complete.
        untie: Give an output layer that is tied to an embedding a copy of its own.

    Returns:
        The report of `fold`. `native_error` is that of the written weights, which are rounded to their types.

    Raises:
        ValueError: If the disk is too small.
        RuntimeError: If a weight overflows in its type, or what was written computes something else.
    """
    model, read = checkpoint.model, checkpoint.read
    ties = _ties(model)
    needed = sum(each.nbytes for each in checkpoint) + untie * sum(read[name].nbytes for name in ties if name in read)
    check_disk(out, needed)
    survey = _survey(checkpoint, example, untie, "fold")
    plan, worst = find_plan(survey)
    edits = {survey.names.get(name, name): edit for name, edit in find_edits(survey.model, plan).items()}
    untied = {name: first for name, first in ties.items() if name in survey.names.values()}
    changes = _in_files(checkpoint, read, edits, ties, untied)
    files = {each.read: each for each in checkpoint}
    added = {name: files[read[name].leaves[0].read] for name in untied if name not in {s.name for s in checkpoint}}  # pyright: ignore[reportArgumentType]
    report = survey.audit(plan.outcomes)
    with complete_folder(out) as new:
        _write(checkpoint, new, changes, added, bool(untied))
        try:
            written = Checkpoint(new)
        except ValueError as error:
            if ties.keys() == untied.keys():
                raise
            others = listed(ties.keys() - untied.keys())
            raise ValueError(
                f"{type(model).__name__} ties further weights by the same option ({others}), so a checkpoint cannot "
                "untie its output layer alone; fold it without --untie"
            ) from error
        native = survey.written_error(written.model)
        types = {each.dtype for each in checkpoint if each.dtype.is_floating_point}
        rounding = max(torch.finfo(each).eps for each in types)
        if not native <= max(1e-9, 64 * rounding):
            raise RuntimeError(f"{out} was not written: as transformers loads it, its outputs differ by {native:.1e}")
    return Report(**vars(report), max_error=worst, native_error=native, largest_factor=largest_factor(plan))


def audit_checkpoint(checkpoint: Checkpoint, example: dict[str, Any]) -> Audit:
    """Report what `fold_checkpoint` can make of each norm; no large weight is read."""
    survey = _survey(checkpoint, example, False, "audit")
    return survey.audit(FoldPlan(survey.trace, survey.model).outcomes)


def _survey(checkpoint: Checkpoint, example: dict[str, Any], untie: bool, verb: str) -> Survey:
    kwargs = {key: value for key, value in example.items() if key != "outputs"}
    call, outputs = Call((), kwargs), example.get("outputs")
    return Survey(checkpoint.model, call, outputs, untie, True, verb, keep=True, stream=True)


def doubtful_gains(model: nn.Module) -> list[str]:
    """Find gains that were stored for another class: a warning for each class of norms, with the names.

    A class multiplies by the weight that it stores, or by 1 + weight. Checkpoints that were converted between the two
    are wrong by 1. A class is doubtful where most of its stored weights are near the number that the other kind begins
    with: near 0 if it multiplies by them, near 1 if it adds 1.

    Examples:
        >>> norm = nn.LayerNorm(4)
        >>> nn.init.zeros_(norm.weight)
        Parameter containing:
        tensor([0., 0., 0., 0.], requires_grad=True)
        >>> doubtful_gains(nn.Sequential(norm))
        ['LayerNorm multiplies by its weight, which is near 0 in 1 of 1: 0.weight']
    """
    kinds: dict[str, list[tuple[str, int, bool]]] = defaultdict(list)  # name, what its class adds, is it doubtful
    for name, found in find(model).items():
        module = model.get_submodule(name)
        stored = getattr(module, "weight", None)
        if found.running is None and found.weight is not None and isinstance(stored, Tensor):
            stored = stored.detach().float()
            adds = int((found.weight.detach().float() - stored).mean() > 0.5)
            near = float((stored - adds).abs().mean()) < NEAR
            kinds[type(module).__name__].append((f"{name}.weight" if name else "weight", adds, near))
    return [
        f"{kind} multiplies by {'1 + ' * norms[0][1]}its weight, which is near {norms[0][1]} in {len(names)} of "
        f"{len(norms)}: {listed(names, 4)}"
        for kind, norms in kinds.items()
        if 2 * len(names := [name for name, _, near in norms if near]) > len(norms)
    ]


def _in_files(
    checkpoint: Checkpoint, read: dict[str, Lazy], edits: dict[str, Edit], ties: dict[str, str], untied: dict[str, str]
) -> dict[str, Edit]:
    """The changes of the tensors in the files, from those of parameters."""
    files = {stored.read: stored for stored in checkpoint}
    changes: dict[str, Edit] = {}
    for name, edit in edits.items():
        parts = [files[leaf.read] for leaf in read[name].leaves]  # pyright: ignore[reportArgumentType]
        if name in untied:
            changes[name] = edit
        elif read[name].read == parts[0].read:
            changes[parts[0].name] = edit
        else:
            changes |= _through(read[name], parts, edit)
    for name, first in ties.items():  # a second copy, in a file, of a tensor that stays tied
        if name not in untied and first in edits:
            changes[name] = edits[first]
    return changes


def _through(source: Lazy, parts: list[Stored], edit: Edit) -> dict[str, Edit]:
    """The changes of tensors from which a parameter is put together: its own, moved back as a gradient is."""
    for part in parts:
        part.stand_in = torch.zeros((), dtype=torch.float64, requires_grad=True).expand(part.shape)
    try:
        with torch.enable_grad(), only_moving():
            whole = source.numbers()
        given = [part.stand_in for part in parts]
        moved = [torch.autograd.grad(whole, given, t.expand(whole.shape), retain_graph=True) for t in edit]  # pyright: ignore[reportCallIssue, reportArgumentType]
    finally:
        for part in parts:
            part.stand_in = None
    return {part.name: Edit(*both) for part, *both in zip(parts, *moved, strict=True)}


def _write(checkpoint: Checkpoint, out: Path, changes: dict[str, Edit], added: dict[str, Stored], untied: bool) -> None:
    """Write the weights and all other files of a checkpoint."""
    copy_small_files(checkpoint.path, out)
    shards = {name: {stored.name: stored for stored in shard} for name, shard in checkpoint.shards.items()}
    shards[[*shards][-1]] |= added
    for name, shard in shards.items():
        _write_shard(out / name, shard, changes, {"format": "pt"} | checkpoint.metadata[name])
    if checkpoint.indexed:
        index = _json(checkpoint.path / INDEX)
        size = sum(stored.nbytes for shard in shards.values() for stored in shard.values())
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": size}
        index["weight_map"] = {key: name for name, shard in shards.items() for key in shard}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf8")
    if untied:
        config = copy.deepcopy(checkpoint.config)
        for each in (config, config.get("text_config")):
            if isinstance(each, dict):
                each["tie_word_embeddings"] = False
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
    else:
        shutil.copyfile(checkpoint.path / "config.json", out / "config.json")


def _write_shard(file: Path, shard: dict[str, Stored], changes: dict[str, Edit], metadata: dict[str, str]) -> None:
    """Write tensors as safetensors, in blocks."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, stored in shard.items():
        header[name] = {"dtype": stored.type, "shape": stored.shape, "data_offsets": (at, at := at + stored.nbytes)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    wide = torch.empty(0, dtype=torch.float64)  # one memory for all blocks: new memory costs more than the numbers
    with file.open("wb") as opened, ThreadPoolExecutor(1) as disk:
        written = disk.submit(opened.write, struct.pack("<Q", len(text)) + text)
        for name, stored in shard.items():
            for rows, old in blocks(stored.lazy()):
                new = old
                if name in changes:
                    new = _rounded(changes[name](in_float64(old, out=wide), rows, out=wide), old, name)
                written.result()  # of the block before, written while this one was computed
                written = disk.submit(opened.write, new.contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        written.result()


def _rounded(values: Tensor, old: Tensor, name: str) -> Tensor:
    new = values.to(old.dtype, copy=True)
    if not bool(new.sum().isfinite()) and bool((~new.isfinite() & old.isfinite()).any()):
        raise RuntimeError(f"{name}: a changed weight exceeds what {old.dtype} holds; save the model in float32 first")
    return new


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when the block ends without an error.

    What an interrupted run left is removed.
    """
    new = out.resolve().with_name(f".{out.resolve().name}.partial")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        new.replace(out.resolve())  # of an empty folder
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_disk(out: Path, needed: int) -> None:
    """Raise a ValueError unless a new folder can be written, of a size in bytes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name another folder")
    parent = next(parent for parent in out.resolve().parents if parent.is_dir())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise ValueError(f"{parent} has {free / 1e9:.2f} GB free; the folded model needs {needed / 1e9:.2f} GB")


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _ties(model: nn.Module) -> dict[str, str]:
    """Parameters that are others, by name: the first name of each."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}


def _held(tensor: Lazy) -> Tensor:
    numbers = tensor.numbers()
    return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf8"))
        if not isinstance(found, dict):
            raise ValueError("it is no mapping")
    except ValueError as problem:
        raise ValueError(f"{file} is cut short or damaged ({problem}); get it again") from problem
    return found
