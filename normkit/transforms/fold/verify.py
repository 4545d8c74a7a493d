"""Compare two models in float64, on an example and on random inputs made after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.transforms.fold.float64 import in_float64, widened
from normkit.transforms.fold.inputs import Call, variants
from normkit.transforms.invoke import example_call, tensors

Outputs = dict[str, Tensor]  # by path in what the model returns


class Verifier:
    """Calls of a model in float64 and its outputs, to compare a changed copy with.

    Args:
        model: A copy of the model in float64.
        args: Positional arguments of the example.
        kwargs: Keyword arguments of the example.
        outputs: Picks what is compared from what the model returns; everything by default.
        verb: The public function that verifies, for error messages.

    Raises:
        ValueError: if the example does not fit the model, or if its output proves nothing.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any, verb: str):
        self.outputs, self.verb = outputs, verb
        self.calls: dict[str, Call] = {"the example": widened((args, kwargs))}
        self.expected: dict[str, Outputs] = {}
        self.failure = ""  # of the last model that was compared
        with in_float64():
            given = self.calls["the example"]
            first = example_call(model, *given, verb, (args, kwargs), "a float64 copy of the model")
            self._example = self._picked(first)

    def record(
        self, model: nn.Module, run: Callable[[str, tuple, dict[str, Any]], Outputs], other_shapes: bool = True
    ) -> None:
        """Run the example again, and those inputs made after it that the model accepts."""

        def recorded(label: str, args: tuple, kwargs: dict[str, Any]) -> None:
            out = run(label, args, kwargs)
            if label != "the example":
                self._require_numbers(out)
            self.expected[label] = out

        with in_float64():
            args, kwargs = self.calls["the example"]
            made = variants(model, args, kwargs, other_shapes, recorded)
            recorded("the example", args, kwargs)
        self.calls |= made
        if not error(self.expected["the example"], self._example) <= 1e-12:
            raise ValueError(
                f"{self.verb}() ran the model twice on the example and got different outputs: its forward is random or "
                "keeps state, so nothing can be proved about it. Remove what is random, or reset the state in forward"
            )

    def worst(self, model: nn.Module) -> float:
        """The largest error of a changed model; inf where it fails, as in `failure`."""
        worst, self.failure = 0.0, ""
        with in_float64():
            for label, (args, kwargs) in self.calls.items():
                try:
                    out = self.pick(model(*args, **kwargs))
                except Exception as problem:
                    self.failure = f"{type(problem).__name__}: {problem}"
                    return float("inf")
                worst = max(worst, error(out, self.expected[label]))
        return worst

    def pick(self, out: Any) -> Outputs:
        """The tensors to compare in what a model returns, copied: later calls may write over them."""
        return {path: t.clone() for path, t in tensors(self.outputs(out) if self.outputs else out).items()}

    def _picked(self, out: Any) -> Outputs:
        try:
            picked = self.pick(out)
        except Exception as problem:
            raise ValueError(
                f"{self.verb}() could not apply outputs= to what the model returned: {problem}"
            ) from problem
        if not picked:
            raise ValueError(
                f"{self.verb}() found no tensor in what the model returned ({type(out).__name__}); pass outputs="
            )
        self._require_numbers(picked)
        return picked

    def _require_numbers(self, out: Outputs) -> None:
        """Raise a ValueError for NaN and for outputs without finite numbers; masks are infinite."""
        for path, t in out.items():
            if t.dtype.is_floating_point and (t.isnan().any() or (t.numel() and not t.isfinite().any())):
                what = "no number is finite" if not t.isfinite().any() else "some numbers are NaN"
                raise ValueError(
                    f"{self.verb}() cannot prove anything on the example: {what} in the output"
                    f"{f' {path}' if path else ''} of a float64 copy of the model. Give an example with finite outputs"
                )


@torch.no_grad()
def error(mine: Any, theirs: Any, outputs: Callable[[Any], Any] | None = None) -> float:
    """Compute the largest difference between two outputs, relative to each largest number.

    Args:
        mine: What one model returned.
        theirs: What the other model returned, the reference.
        outputs: Picks what is compared; everything by default.

    Returns:
        The error; inf where shapes, types of numbers or infinite numbers differ.

    Example:
        >>> error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]))
        1.0
    """
    mine, theirs = (tensors(outputs(out) if outputs else out) for out in (mine, theirs))
    if mine.keys() != theirs.keys() or not mine:
        return float("inf")
    return max(_difference(mine[path], theirs[path]) for path in mine)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite].double(), b[finite].double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0
