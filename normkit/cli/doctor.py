"""The command that says what is wrong: `doctor`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normkit.cli.line import BAD_INPUT, parse_arguments, write

ILL = 1  # exit status where something was found


def doctor(arguments: list[str]) -> int:
    """What is wrong with a run, in words, by its recorded rows."""
    from tyro.conf import Positional

    def parse(path: Positional[Path]) -> dict[str, Any]:
        """Say what the recorded statistics of a run show: what will fail, where, and what helps; exit status 1 then.

        What the rows do not let it check is named, with how to record it; exit status 2 where that is everything.

        Args:
            path: A run folder, or a file of rows (.csv, .parquet).
        """
        return locals()

    from normkit.watch import NOT_CHECKED, checked, read
    from normkit.watch.series import tabulate

    path = parse_arguments(parse, arguments, "doctor")["path"]
    table, ended = tabulate(read(path)), _ending(path)
    wrong, unchecked, advice = examine(table)
    could = checked(table)
    if wrong or ended:
        write("\n".join(f"- {line}" for line in [*ended, *wrong]))
    else:
        write(f"nothing wrong was found in {len(could)} checks: {', '.join(could)}" if could else "nothing was checked")
    for title, lines in ((f"{NOT_CHECKED}:", unchecked), ("where a norm keeps no batch statistics:", advice)):
        if lines:
            write("\n".join(["", title, *(f"- {line}" for line in lines)]))
    return ILL if wrong or ended else 0 if could else BAD_INPUT


def examine(rows: Any) -> tuple[list[str], list[str], list[str]]:
    """What is wrong by these rows, what they do not let anybody check, and what batch statistics would do."""
    from normkit.watch import NOT_CHECKED, advise, diagnose

    found = diagnose(rows)
    wrong = [str(finding) for finding in found if finding.kind != NOT_CHECKED]
    return wrong, [str(finding) for finding in found if finding.kind == NOT_CHECKED], advise(rows)


def _ending(path: Path) -> Iterable[str]:
    """What became of a run that did not end well: rows between two looks may not show it."""
    from normkit.lab.report import results

    if not (path.is_dir() and (path / results.FILE).is_file()):
        return []
    status = results.read(path)["status"]
    return [f"the run {status}: see its losses before that step"] if status.startswith("diverged") else []
