"""The command `compare`: do runs differ by more than chance?"""

from pathlib import Path

from normkit.cli.line import command, write


@command
def compare(runs: tuple[Path, ...], /) -> int:
    """Compare runs: intervals over seeds, paired bootstrap of translations.

    All are compared with the first. The intervals compare settings, such as norms; the bootstrap compares two trained
    models.

    Args:
        runs: Folders of runs, or folders that hold one run's seeds.
    """
    if not runs:
        raise ValueError("no run given; try `normkit compare runs/layer runs/un`")
    from normkit.lab.train.compare import compared

    write("\n".join(compared(runs)))
    return 0
