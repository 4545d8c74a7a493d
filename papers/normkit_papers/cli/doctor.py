"""The command `doctor`: find faults of a run in its recorded rows."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normkit_papers.cli.line import BAD_INPUT, command, write

FOUND = 1  # exit status if something was found


@command
def doctor(path: Path, /) -> int:
    """Find faults of a run in its recorded rows.

    Faults are listed with remedies; the exit status is 1. Checks for which the rows do not suffice are listed with how
    to record more; exit status 2 if these are all.

    Args:
        path: A run folder, or a file of rows (.csv, .parquet).
    """
    from normkit.watch import NOT_CHECKED, checked, read
    from normkit.watch.recording import as_recording

    rows, result = read(path), _result(path)
    if not rows and (ending := list(_ending(result))):
        write("\n".join(f"- {line}" for line in [*ending, "no rows were recorded, which could name the reason"]))
        return FOUND
    recording = as_recording(rows)
    faults, unchecked, advice = examine(recording, result)
    made = checked(recording)
    if faults:
        write("\n".join(f"- {line}" for line in faults))
    else:
        write(f"nothing wrong was found in {len(made)} checks: {', '.join(made)}" if made else "nothing was checked")
    for title, lines in ((f"{NOT_CHECKED}:", unchecked), ("norms that keep no batch statistics:", advice)):
        if lines:
            write("\n".join(["", title, *(f"- {line}" for line in lines)]))
    return FOUND if faults else 0 if made else BAD_INPUT


def examine(rows: Any, result: Mapping[str, Any] | None = None) -> tuple[list[str], list[str], list[str]]:
    """Diagnose a run: faults, checks that could not be made, and advice on batch statistics.

    If the result of the run has a calibrated score, advice to calibrate is replaced by what calibration did there. A
    calibration that repaired most of a loss is a finding of its own where the rows show no reason, as with dropout.
    """
    from normkit.watch import NOT_CHECKED, advise, diagnose

    found = diagnose(rows)
    measured = _measured_advice(result) if result is not None else ""
    faults = [
        dataclasses.replace(one, advice=measured) if measured and "calibrate the model" in one.advice else one
        for one in found
        if one.kind != NOT_CHECKED
    ]
    lines = [*_ending(result), *map(str, faults)]
    if measured.startswith("calibrate") and not any(measured in line for line in lines):
        lines.append(f"running statistics do not fit inference, as after training with much dropout: {measured}")
    return lines, [one.message for one in found if one.kind == NOT_CHECKED], advise(rows)


def _measured_advice(result: Mapping[str, Any]) -> str:
    """Name the remedy for running statistics by the run's scores; empty without calibration."""
    from normkit_papers.report.verdict import calibration_repair

    repair = calibration_repair(result)
    if repair is None:
        return ""
    share, scores = repair
    if share >= 0.5:
        return f"calibrate the model, which repaired {100 * share:.0f} % of the loss here ({scores})"
    mixing = "train with --no-bucketing" if result["run"].get("bucketing") else "mix them"
    done = f"repaired only {100 * share:.0f} % of the loss here" if share > 0 else "did not help here"
    return f"calibration {done} ({scores}): the batches differ from each other; {mixing}, or use a per-token norm"


def _result(path: Path) -> Mapping[str, Any] | None:
    from normkit_papers.report import results

    return results.read(path) if path.is_dir() and (path / results.FILE).is_file() else None


def _ending(result: Mapping[str, Any] | None) -> Iterable[str]:
    """The outcome of a run that diverged, possibly between two samples."""
    from normkit._util import escape

    status = escape(result["status"]) if result is not None else ""
    return [f"the run {status}: see its losses before that step"] if status.startswith("diverged") else []
