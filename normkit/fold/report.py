"""Reports of folding: the outcome of each norm, and the table of all."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from normkit._util import align, listed
from normkit.fold.alike import join

GONE = ("folded", "folded back")
UNREPLACED = ("kept", "gain changed")  # the module stays
WIDTH = 118  # characters of a line
LONG = re.compile(r"(?<![\w.])\d+\.\d{7,}(?:e[-+]\d+)?")  # a number of many digits
UNEVEN = 1e4  # factor of a weight above which float16 and 8-bit integers suffer


@dataclass(frozen=True)
class Outcome:
    """Outcome of one norm.

    `action` is "folded" (into layers that read it, and those that write its input where a stream was rescaled),
    "folded back" (only into layers that write its input), "multiply-add" or "add" (all that is left of it), or
    "kept". Of a norm that computes statistics at inference it is "gain folded", "gain changed" (it took the scale and
    shift of norms after it) or "kept". `into` are layers that took its scale and shift: readers of its output, writers
    of its input. Other readers of a rescaled stream change, too. `why` is the reason for what is left.
    """

    name: str
    norm: str
    action: str
    into: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Audit:
    """Outcome of every norm: iterates over its rows, prints as a table.

    `tried` are labels of the calls. `absent` are arguments that the model takes and the example does not have.
    `untied` is the number of parameters of the copies that `untie` made. `unreadable` are modules named like norms
    that stay as they are, with the reason. `added` are arguments that the example does not have, and with which the
    model was called. `other_inputs` are modules that read inputs which the example does not have, such as images; they
    did not run, and stay as they are. `deciding` are modules that read values of tensors, as branches do.
    """

    rows: tuple[Outcome, ...]
    tried: tuple[str, ...]
    absent: tuple[str, ...] = ()
    untied: int = 0
    unreadable: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    other_inputs: tuple[str, ...] = ()
    deciding: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, *actions: str) -> int:
        """Count the norms that have one of these actions."""
        return sum(row.action in actions for row in self.rows)

    @property
    def foldable(self) -> str:
        """The number of norms that vanish, as "9 of 10"."""
        return f"{self.count(*GONE)} of {len(self.rows)}"

    @property
    def table(self) -> str:
        """A row for each norm, or one for those that are alike in three blocks or more."""
        head = ("norm", "is", "becomes", "into, or why not")
        lines = [
            (row.name or "(the model)", LONG.sub(_short, row.norm), row.action,
             "; ".join(part for part in (listed(row.into, 4), row.why) if part))
            for row in self.rows
        ]  # fmt: skip
        return align([head, *join(lines)])

    @property
    def summary(self) -> str:
        """Numbers of norms, and what was taken as given."""
        gains, rms, gone = self.count("gain folded"), self.count("rms"), self.count(*GONE)
        known = [f"{self.foldable} norms fold away"] * (gone > 0 or not gains + rms)
        known += [f"{rms} of {len(self)} norms become RMSNorm"] * bool(rms)
        known += [f"{gains} of {len(self)} norms stay, and lose their gain"] * bool(gains)
        left = self.count("multiply-add", "add")
        known += [f"a multiply-add or an addition is left of {left}"] * bool(left)
        known += [f"{self.untied:,} added by untying"] * bool(self.untied)
        notes = {
            "called with": self.added,
            "not in the example, so taken as never given, or never changed:": self.absent,
            "branches on values, of which only those of the example were followed, in": self.deciding,
            "left as they are, since they cannot be read:": [listed(self.unreadable, 4)] * bool(self.unreadable),
            "not run and left as they are, since they read other inputs:": self.other_inputs,
        }
        said = [f"{what} {', '.join(which)}" for what, which in notes.items() if which]
        return "\n".join([", ".join(known), *said])

    def __str__(self) -> str:
        lines = f"{self.table}\n{self.summary}".splitlines()
        options = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
        return "\n".join(textwrap.fill(line, WIDTH, **options) for line in lines)


@dataclass(frozen=True)
class Report(Audit):
    """Result of `fold`: the outcomes, and the errors of the comparison.

    `max_error` is the largest error in float64, relative to the largest output, `native_error` that of the returned
    model in its own type: inf where rounding changes whole numbers or shapes in the output, such as predicted classes.
    `largest_factor` is the largest number that any weight was multiplied by. `saved` is the number of parameters that
    the model has fewer, those of `untied` copies left out.
    """

    max_error: float = 0.0
    native_error: float = 0.0
    largest_factor: float = 1.0
    saved: int = 0

    @property
    def summary(self) -> str:
        """Numbers of norms and parameters, and the errors of the comparison."""
        zero = ""
        if self.max_error == 0 and any(row.into for row in self):  # rounding leaves an error where norms matter
            zero = "\nno output changed by a single bit: where layers after the norms are zero, this shows nothing"
        saved = f"\n{abs(self.saved):,} parameters {'saved' if self.saved > 0 else 'more'}" * bool(self.saved)
        text = (
            f"{super().summary}\ncompared on: {'; '.join(self.tried)}\n"
            f"largest error, the largest output being 1: {self.max_error:.1e} in float64, {self.native_error:.1e} once "
            f"rounded to the model's type{zero}{saved}"
        )
        if self.largest_factor > UNEVEN:
            text += (
                f"\nthe largest factor of a weight is {self.largest_factor:.2g}: no fault in float32 and bfloat16;\n"
                "for float16 and 8-bit integers fold with multiply_adds=True (remove-norms --multiply-adds)"
            )
        return text


def _short(number: re.Match[str]) -> str:
    """Write a number with at most six digits, as an eps that was rounded to float32."""
    return f"{float(number[0]):g}"
