"""Diagnosis of a training run from its rows."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from normkit.watch.checks import CHECKS
from normkit.watch.findings import NOT_CHECKED, OFTEN, Check, Finding, format_sites
from normkit.watch.rows import Recording, Row, read
from normkit.watch.sites import traits


class Findings(list[Finding]):
    """Faults, then the checks that could not be made; prints as lines.

    Attributes:
        checked: Kinds of faults for which the rows suffice, at one norm of the model at least.
    """

    def __init__(self, found: Iterable[Finding], checked: list[str]):
        super().__init__(found)
        self.checked = checked

    @property
    def faults(self) -> list[Finding]:
        """The findings without the checks that could not be made."""
        return [finding for finding in self if finding.kind != NOT_CHECKED]

    def __str__(self) -> str:
        lines = [f"- {fault}" for fault in self.faults]
        made = f"nothing wrong was found in {len(self.checked)} checks: {', '.join(self.checked)}"
        unchecked = [f"- {finding.message}" for finding in self if finding.kind == NOT_CHECKED]
        lines = lines or [made if self.checked else "nothing was checked"]
        return "\n".join([*lines, *(["", f"{NOT_CHECKED}:", *unchecked] if unchecked else [])])


def diagnose(rows: Iterable[Row] | Recording | str | Path) -> Findings:
    r"""Find faults of a training run in its recorded rows.

    Checks for which the rows do not suffice are findings of kind "not checked" that name them. "No finding" is no
    proof: only what is in `CHECKS` is looked for.

    Args:
        rows: Rows as `normkit.record` gives them, or the path of the .csv file that it wrote.

    Returns:
        The findings, a list that prints as lines.

    Raises:
        TypeError: for anything but rows.
        ValueError: without any row, or for a file of another kind.

    Examples:
        >>> found = diagnose([Row(1, "norm", "batch", "padding", 0.3)])
        >>> [finding.kind for finding in found]
        ['padding', 'not checked', 'not checked']
    """
    recording = _recording(read(rows) if isinstance(rows, str | Path) else rows)
    found: list[Finding] = []
    lacking: dict[str, list[tuple[Check, str, tuple[str, ...]]]] = {}  # advice -> check, site, missing quantities
    for check in CHECKS:
        found += check.rule(check, recording) if recording.last_step() >= check.steps else []
        for site, names in _missing(check, recording).items():
            if check.how:
                lacking.setdefault(check.how if names else OFTEN, []).append((check, site, names))
    found += [_not_checked(how, entries, recording) for how, entries in lacking.items()]
    made = (check.kind for check in CHECKS if len(_missing(check, recording)) < len(_judged(check, recording)))
    return Findings(found, list(dict.fromkeys(made)))


def _recording(rows: Iterable[Row] | Recording) -> Recording:
    found = rows if isinstance(rows, Recording) else Recording(rows)
    if not found.quantities:
        raise ValueError("there are no rows to judge: normkit.record records forwards of the model in training mode")
    return found


def _judged(check: Check, recording: Recording) -> list[str]:
    """The sites that a check concerns; [""] for the whole model, or if the rows name no norm."""
    norms = recording.norms()
    if check.judges is None or not norms:
        return [""]
    return [site for site, norm in norms.items() if check.judges(traits(norm))]


def _missing(check: Check, recording: Recording) -> dict[str, tuple[str, ...]]:
    """Sites where a check cannot be made: missing quantities, or () for too few values."""
    found = {}
    for site in _judged(check, recording):
        needs = check.needs.split()
        if site in recording.quantities.get(check.instead, {}):
            continue
        lacks = tuple(name for name in needs if site not in recording.quantities.get(name, {}))
        few = not lacks and any(len(recording.quantities[name][site].values) < check.samples for name in needs)
        if lacks or few or recording.last_step() < check.steps:
            found[site] = lacks
    return found


def _not_checked(how: str, entries: Sequence[tuple[Check, str, tuple[str, ...]]], recording: Recording) -> Finding:
    kinds = dict.fromkeys(check.kind for check, *_ in entries)
    sites = dict.fromkeys(site for _, site, _ in entries)
    names = dict.fromkeys(name for *_, names in entries for name in names)
    steps, samples = (max(getattr(check, name) for check, *_ in entries) for name in ("steps", "samples"))
    needed = f"{steps:g} steps and {samples} samples" if steps else f"{samples} samples"
    end = recording.last_step()
    series = (recording.of(name).get(site) for check, site, _ in entries for name in check.needs.split())
    have = min((len(each.values) for each in series if each), default=0)
    ends = f"the rows end at step {end}, with {have} samples"
    why = f"{', '.join(names)} not recorded" if names else f"needs {needed}; {ends}"
    where = f" at {format_sites(sites, recording)}" if any(sites) else ""
    return Finding(NOT_CHECKED, tuple(sites), f"{', '.join(kinds)}: {why}{where}; {how}", {})
