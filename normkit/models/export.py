"""Export a model to a file, run the file in its runtime, and compare."""

import contextlib
import io
import logging
import math
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit._util import as_path, is_number, require, require_flags, require_functions, warn
from normkit.models.attention import with_fused_attention
from normkit.models.checks import (
    check_not_meta,
    check_not_training,
    check_not_wrapped,
    copy_model,
    needs,
    warn_untrained,
)
from normkit.models.difference import error
from normkit.models.invoke import Call, Pick, check_batches, example_call
from normkit.models.quantize import calibration, quantize
from normkit.models.run_exported import run, takes_other_sizes, true_limits
from normkit.models.tensor_model import TensorModel, open_axes, picked

NORMALIZES = (  # parts of operation names, in ONNX or ATen, that compute or divide by statistics
    "layernorm", "layer_norm", "normalization", "rms_norm", "batch_norm", "group_norm", "native_norm", "div", "sqrt",
    "mvn", "reciprocal", "reducemean", "reducel2", "var_mean", "linalg_vector_norm",
)  # fmt: skip


NOT_FOLLOWED = {  # errors of torch.export, and what may help
    "UserError": "len(x) fixes an axis, x.shape[0] does not; dynamic=False fixes all",
    "GuardOnDataDependentSymNode": "a branch depends on values of a tensor, as in nn.TransformerDecoder, which asks "
    "whether a mask is causal unless tgt_is_causal= is passed, or `if len(chosen):`",
}
UNBOUNDED = 1 << 31  # sizes of axes that no branch limits
FEWEST = 2  # size that PyTorch takes an open axis to have at least
NEAR = 0.9  # cosine of outputs in integers below which `export` warns


@dataclass(frozen=True)
class Exported:
    """Result of `export`: operations of the graph with counts, and the error in the runtime.

    Attributes:
        path: The file.
        operations: Count of each operation.
        runtime: The runtime that ran the file.
        max_error: Largest difference to the model's outputs, relative to the largest output.
        cosine: Smallest cosine to an output of the model, in integers; None in float.
        dynamic: Open axes of each input, by its name.
        outputs: Names of the outputs, in order; those of an .onnx file. A .pt2 file returns one as it is, several as a
            tuple.
        equal: Inputs whose lengths have to be equal in the file. Where the model takes others, give such an example.
        limits: Smallest and largest size (None: any) of an open axis, by input and axis, where the model branches on
            that size alone. Of an .onnx file, those beyond which it computes something else, or the model fails.
    """

    path: Path
    operations: dict[str, int]
    runtime: str
    max_error: float
    cosine: float | None = None
    dynamic: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    limits: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """The limits in words, such as "x 1 from 2 to 64"."""
        return "; ".join(
            f"{k} from {low} on" if high is None else f"{k} up to {high}" if low == 1 else f"{k} from {low} to {high}"
            for k, (low, high) in self.limits.items()
        )

    @property
    def normalizing(self) -> dict[str, int]:
        """Operations that normalize, divide or take roots; empty for a folded graph."""
        return {name: n for name, n in self.operations.items() if any(part in name.lower() for part in NORMALIZES)}

    def __str__(self) -> str:
        kept = ", ".join(f"{n} {name}" for name, n in self.normalizing.items()) or "none"
        int8 = f"; int8, cosine {self.cosine:.4f} on the example" if self.cosine is not None else ""
        axes = "; ".join(f"{name} {', '.join(map(str, axes))}" for name, axes in self.dynamic.items()) or "none"
        axes += f" ({' and '.join(self.equal)} of equal length)" * bool(self.equal)
        axes += f" ({self.allowed})" * bool(self.limits)
        return (
            f"{self.path}: {sum(self.operations.values())} operations, of which normalize: {kept}; largest error "
            f"{self.max_error:.1e} in {self.runtime}{int8}; open axes: {axes}; "
            f"outputs: {', '.join(self.outputs)}"
        )


def export(
    model: nn.Module,
    path: str | Path,
    *example: Any,
    outputs: Pick | None = None,
    dynamic: bool = True,
    tolerance: float | None = None,
    int8: Iterable[Any] | Literal["dynamic"] | None = None,
    fuse_attention: bool = False,
    **kwexample: Any,
) -> Exported:
    """Write a model to a file, run the file, and compare its outputs with the model's.

    Norms with frozen statistics become a multiply and an add (in `.pt2` with a root), folded ones nothing.

    Args:
        model: The model, in evaluation mode.
        path: File to write. The suffix selects the format: `.onnx` (runs in onnxruntime) or `.pt2` (`torch.export`).
        *example: Arguments of a call of the model; with `dynamic`, of at least two samples. Or one mapping of keywords.
        outputs: Picks what to export of the output, such as `lambda out: out.logits`. By default all tensors.
        dynamic: Leave the first axis of every input, the batch, open, and the axis of tokens where the model allows it:
            the second one of integers, masks and `[batch, tokens, channels]`.
        tolerance: Largest accepted error of the float model, relative to the largest output. None for 1e-4 or, of half
            precision, its own rounding.
        int8: Write 8-bit integers by onnxruntime, `.onnx` alone. "dynamic" quantizes weights for each channel, and
            activations while the model runs; it needs no data. Batches calibrate a static quantization of matrix
            products and convolutions; they have the form of the example. The errors of the result are then those
            of the integers, on the example; compare them with those that your task allows.
        fuse_attention: Write each `scaled_dot_product_attention` as one operation of onnxruntime, which other runtimes
            lack. onnxruntime's own fusion does this only beside a LayerNorm.
        **kwexample: Keyword arguments of the call.

    Returns:
        The operations of the file, the runtime, and the error. `exported.normalizing` names those that normalize.

    Raises:
        ValueError: If the model is in training mode, the example or a batch does not fit, the suffix is unknown or has
            no integers, the model has no attention to fuse, or the outputs in float differ by more than `tolerance`.
        ImportError: If a package is missing; the message names the extra to install.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(nn.Linear(2, 3).eval(), f"{folder}/model.pt2", torch.zeros(2, 2)).normalizing
        {}
    """
    check_not_wrapped(model, "export")
    check_not_training(model, "export")
    check_not_meta(model, "export")
    warn_untrained(model, "export")
    require_functions(outputs=outputs)
    require_flags(dynamic=dynamic, fuse_attention=fuse_attention)
    allowed = "a number of at least 0, or None"
    require(tolerance is None or (is_number(tolerance) and tolerance >= 0), "tolerance", tolerance, allowed)
    path = check_target(path, int8, fuse_attention)
    types = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if path.suffix == ".onnx" and torch.bfloat16 in types:
        raise ValueError(f"onnxruntime lacks operations in bfloat16: export {type(model).__name__} as model.float()")
    if tolerance is None:  # half precision rounds at each layer
        tolerance = max([1e-4, *(16 * torch.finfo(each).eps for each in types if each.itemsize == 2)])
    static = int8 is not None and not isinstance(int8, str)
    if static:
        check_batches(int8, "int8=")
    else:
        require(int8 in (None, "dynamic"), "int8", int8, "'dynamic', batches to calibrate on, or None")
    given = Call(example, kwexample).unpacked(model)
    with torch.no_grad():
        found = picked(example_call(model, given.copied(), "export", given), outputs)
    expected = tuple(found.values())
    if not any(t.isfinite().any() for t in expected):
        raise ValueError("export() cannot verify anything: no number of the model output is finite on the example")
    wrapped = TensorModel(copy_model(model), given.copied(), outputs).eval()
    wrapped.results = tuple(name if name not in wrapped.names else f"{name}_out" for name in found)
    shapes = open_axes(wrapped.given) if dynamic else None
    if dynamic and shapes is None:
        warn("the example has one sample, so no axis stays open; give two, or dynamic=False")
    batches = calibration(int8, given, shapes is not None) if static else []  # pyright: ignore[reportArgumentType]
    with quiet(), tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        new = Path(scratch) / "new" / path.name  # and what belongs to it; nothing is replaced before it is verified
        in_float = Path(scratch) / path.name if int8 is not None else new
        new.parent.mkdir()
        of_batch = shapes and open_axes(wrapped.given, tokens=False)
        tries = [shapes, of_batch, open_axes(wrapped.given, batch=False)] if shapes else [None]
        made, got = _write_first(wrapped, in_float, tries, fuse_attention)
        several = any(len(each) > 1 for each in made.dynamic.values())
        if several and not takes_other_sizes(wrapped, in_float, made.dynamic, tolerance):
            made, got = _write_first(wrapped, in_float, [of_batch, None], fuse_attention)
        worst = error(tuple(got), expected)
        if not worst <= tolerance:
            differ = f"outputs differ by {worst:.1e} in {made.runtime}; tolerance={tolerance:.1e} is allowed"
            raise ValueError(f"{path} computes something else than the model: {differ}")
        limits, differs = (
            true_limits(wrapped, in_float, made.dynamic, made.limits, tolerance)
            if path.suffix == ".onnx"
            else (made.limits, False)
        )
        made = replace(made, limits=limits)
        if int8 is not None:
            quantize(in_float, new, [wrapped.feed(batch) for batch in batches] if static else None)
            made, got = replace(made, operations=_operations(new)), run(wrapped, new, wrapped.given)
        for file in sorted(new.parent.iterdir(), key=lambda file: file == new):  # the weights of a graph first
            file.replace(path.with_name(file.name))
    if differs:
        warn(f"{path.name} computes what the model does for {made.allowed}; onnxruntime takes other sizes, too")
    if int8 is None:
        return replace(made, path=path, max_error=worst)
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(got, expected, strict=True)]
    cosine = min(float(torch.cosine_similarity(*pair, dim=0)) for pair in pairs)
    if cosine < NEAR:
        warn(
            f"in 8-bit integers the outputs have a cosine of {cosine:.2f} to those in float, too little for most uses. "
            "Export in float32, quantize with batches, or leave each norm as a multiply-add: "
            "fold(..., multiply_adds=True), or remove-norms --multiply-adds"
        )
    return replace(made, path=path, max_error=error(tuple(got), expected), cosine=cosine)


def check_target(path: str | Path, int8: object, fuse_attention: bool = False) -> Path:
    """Return the path of a file to write; a ValueError if it, or an option, does not allow that."""
    path = as_path(path, "path")
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"export() writes .onnx or .pt2 by the ending of the path; got {path.name!r}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        what = "the folder is missing" if not path.parent.is_dir() else "the folder takes no files"
        what = "it is a folder" if path.is_dir() else what
        raise ValueError(f"export() cannot write {path}: {what}; name a file in a folder that exists")
    if path.suffix == ".pt2" and (int8 is not None or fuse_attention):
        option = "int8" if int8 is not None else "fuse_attention"
        raise ValueError(f"export({option}=) writes .onnx; got {path.name!r}")
    return path


def program_of(model: nn.Module, *example: Tensor, dynamic_shapes: Any = None) -> torch.export.ExportedProgram:
    """Return the `torch.export` program of a model."""
    try:
        with torch.no_grad():
            return torch.export.export(model, example, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        advice = NOT_FOLLOWED.get(type(error).__name__)  # PyTorch writes paragraphs
        if advice is None:
            raise
        why = re.split(r"[!\n]", str(error))[0]
        raise ValueError(f"torch.export cannot follow this model ({why}); {advice}") from error


def operations_of(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Count the operations of a program, most frequent first."""
    return _counted(".".join(str(n.target).split(".")[:2]) for n in program.graph.nodes if n.op == "call_function")


def _counted(names: Iterable[str]) -> dict[str, int]:
    """Count names, most frequent first, then by name."""
    return dict(Counter(sorted(names)).most_common())


def _write(model: TensorModel, path: Path, shapes: Any, fused: bool) -> tuple[Exported, Sequence[Tensor]]:
    """Write a file in float and run it; return what it is, and its outputs on the example."""
    if path.suffix == ".onnx":
        with needs("export() to ONNX", "export"):
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
    program = program_of(model, *model.given, dynamic_shapes=shapes)
    inputs = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    axes = {
        name: found
        for name, t in zip(model.names, inputs, strict=True)
        if (found := tuple(axis for axis, size in enumerate(t.shape) if not isinstance(size, int)))
    }
    limits = {
        f"{name} {axis}": (int(bounds.lower), int(bounds.upper) if bounds.upper < UNBOUNDED else None)
        for name, t in zip(model.names, inputs, strict=True)
        for axis in axes.get(name, ())
        if (bounds := program.range_constraints.get(t.shape[axis].node.expr))
        and (bounds.lower > FEWEST or bounds.upper < UNBOUNDED)
    }
    lengths = {name: str(t.shape[1]) for name, t in zip(model.names, inputs, strict=True) if 1 in axes.get(name, ())}
    equal = tuple(name for name, length in lengths.items() if [*lengths.values()].count(length) > 1)
    if path.suffix == ".onnx":
        program = with_fused_attention(program) if fused else program
        with torch.no_grad():
            written = torch.onnx.export(
                program,
                (),
                input_names=model.names,
                output_names=model.results,
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
        assert written is not None
        written.save(str(path))
        found = Exported(path, _operations(path), "onnxruntime", math.nan, None, axes, model.results, equal, limits)
        return found, run(model, path, model.given)
    with torch.no_grad():
        torch.export.save(program, buffer := io.BytesIO())  # to a file on a full disk, it ends the process
        path.write_bytes(buffer.getbuffer())
        found = Exported(
            path, operations_of(program), "torch.export", math.nan, None, axes, model.results, equal, limits
        )
        return found, run(model, path, model.given)


def _write_first(
    model: TensorModel, path: Path, tries: Iterable[Any], fused: bool
) -> tuple[Exported, Sequence[Tensor]]:
    """Write a file with the first of several choices of open axes that can be written."""
    failed: list[Exception] = []
    for number, shapes in enumerate(tries := [*tries]):
        if shapes not in tries[:number]:
            try:
                return _write(model, path, shapes, fused)
            except (TypeError, ValueError, RuntimeError) as error:
                failed.append(error)
    raise failed[0]


def _operations(path: Path) -> dict[str, int]:
    """Count the operations of an ONNX file."""
    import onnx

    return _counted(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the exporters' progress lines and warnings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
