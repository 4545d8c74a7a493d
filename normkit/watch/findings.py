"""Findings of a diagnosis, and what a check is made of: thresholds, quantities, and a rule."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit._util import listed
from normkit.watch.rows import Recording, Series
from normkit.watch.sites import Traits, traits

NOT_CHECKED = "not checked"  # kind of a finding that names checks for which the rows do not suffice


class Threshold(NamedTuple):
    """A number that a rule compares with, and its meaning."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Threshold] = {
    "fall": Threshold(0.02, "share of the loss by which it has to fall: from the first steps, or while it is high"),
    "rise": Threshold(1.5, "largest loss over the first, or last over a constant prediction's: a divergence"),
    "constant": Threshold(0.95, "loss over that of the best constant prediction, above which nothing was learned"),
    "trained": Threshold(0.8, "the same ratio, below which a loss that does not fall is that of a trained model"),
    "similarity": Threshold(0.985, "mean cosine between tokens of a sequence, above which they have collapsed"),
    "growth": Threshold(30.0, "rms of a norm's input over the first norm's or over its start, both at least 1"),
    "largest": Threshold(6e4, "largest magnitude, near where float16 ends (65504)"),
    "spike": Threshold(20.0, "gradient norm over its median"),
    "dead": Threshold(0.05, "share of dead channels"),
    "typical_token": Threshold(0.1, "median over mean of the tokens' mean squares, below which a few tokens decide"),
    "token_share": Threshold(0.2, "share of tokens that the mean square averages over, below which a few decide it"),
    "padding": Threshold(0.01, "share of padding among the rows of a norm with batch statistics"),
    "tokens": Threshold(32, "rows of a batch below which its statistics are mostly chance"),
    "steps": Threshold(20, "steps before which running statistics still show their initial values: no gap is judged"),
    "gap": Threshold(0.25, "gap at evaluation, of the output's own size, above which frozen batch statistics fail"),
    "gap_holds": Threshold(0.15, "gap up to which a norm by quadratic means holds"),
    "length_share": Threshold(0.2, "share of the variance between batches that batch length explains"),
    "target_share": Threshold(0.05, "share of target lengths, given source lengths, that differs between batches"),
    "filtered_rate": Threshold(0.5, "share of steps that outlier filtration drops, above which UN is PN-V"),
    "Gamma": Threshold(1.0, "Gamma over its bound, above which nu grows"),
    "nu": Threshold(1e3, "growth of ||nu|| over its median, which is divergence"),
}

LIMITS = {name: threshold.value for name, threshold in THRESHOLDS.items()}
RECORD = (
    'record them: nk.record(model, quantities="default"), or papers train --quantities default; norms in evaluation'
    " mode are not measured"
)
OFTEN = "record more often (every=, --record-every), or train longer; forwards in evaluation mode do not count"
LOSS = (
    "record it: nk.record(model, loss=criterion), the module that the loop calls once a step; known for the mean of"
    " CrossEntropyLoss, NLLLoss, MSELoss, BCELoss and BCEWithLogitsLoss without weights; loss=lambda: loss records the"
    " loss alone; in Lightning Watch(loss='criterion')"
)
MASK = "a model without padding needs no more; else pass a mask, or give the embedding its padding_idx"


@dataclass(frozen=True)
class Finding:
    """A fault of a run, or (kind "not checked") checks for which the rows do not suffice.

    Attributes:
        kind: Name of the fault.
        where: Sites concerned; "" is the whole model.
        message: The observation in a sentence, with its numbers.
        evidence: The numbers by site or name.
        advice: The remedy; may be empty.
    """

    kind: str
    where: tuple[str, ...]
    message: str
    evidence: Mapping[str, float]
    advice: str = ""

    def __str__(self) -> str:
        lead = f"{NOT_CHECKED}: " if self.kind == NOT_CHECKED else ""
        return lead + self.message + (f": {self.advice}" if self.advice else "")


class Check(NamedTuple):
    """A check for one fault."""

    kind: str  # name of the fault
    rule: "Rule"  # finds it in a recording
    needs: str  # quantities that it takes, separated by blanks
    judges: Callable[[Traits], bool] | None  # true for norms that it judges; None: the whole model
    samples: int = 1  # values of each quantity that it takes at least
    steps: float = 0  # length of the run from which on it judges
    how: str = RECORD  # advice on how to record the quantities; "": where they are missing, the check has no meaning
    instead: str = ""  # a quantity that answers the question in their place

    def series(self, recording: Recording) -> dict[str, Series]:
        """The series of the first quantity needed, at the norms that are judged."""
        found = recording.of(self.needs.split()[0])
        return {site: each for site, each in found.items() if self.judges is None or self.judges(traits(each.norm))}

    def findings(
        self, recording: Recording, hit: Mapping[str, float], message: str, advice: str = "", least: bool = False,
        kind: str = "",
    ) -> list[Finding]:  # fmt: skip
        """The finding about the sites in `hit`; none if there are none.

        The message is formatted with the largest number (or the `least`), `{0}`, and the same in percent, `{percent}`.
        """
        if not hit:
            return []
        worst = min(hit.values()) if least else max(hit.values())
        where = f"{format_sites(hit, recording)}: " if any(hit) else ""
        text = where + message.format(worst, percent=100 * worst)
        return [Finding(kind or self.kind, tuple(hit), text, hit, advice)]


Rule = Callable[[Check, Recording], list[Finding]]
Number = Callable[[Series], float]  # one number of a series


def by_site(
    limit: float, message: str, advice: str = "", *, number: Number = Series.middle, below: bool = False
) -> Rule:
    """Make a rule: a number of each norm's series must not be above (or `below`) a limit."""

    def rule(check: Check, recording: Recording) -> list[Finding]:
        numbers = {site: number(each) for site, each in check.series(recording).items()}
        hit = {site: value for site, value in numbers.items() if (value < limit if below else value > limit)}
        return check.findings(recording, hit, message, advice, least=below)

    return rule


def above(limit: float, series: Mapping[str, Series], number: Number = Series.middle) -> dict[str, float]:
    """Return a number of each site's series, where it is above a limit."""
    return {site: value for site, each in series.items() if (value := number(each)) > limit}


def first_where(series: Series, is_bad: Callable[[float], bool]) -> int:
    """Return the first step whose value is bad."""
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(value))


def format_sites(sites: Collection[str], recording: Recording) -> str:
    """Name sites in few words: all norms, or a list."""
    norms = recording.norms()
    return f"all {len(norms)} norms" if len(norms) > 2 and set(norms) <= set(sites) else listed(sites)
