"""The command `compare`: do runs differ by more than chance?"""

from pathlib import Path

from normkit.cli.line import parse_arguments, write


def compare(arguments: list[str]) -> int:
    """Compare runs: intervals over seeds, paired bootstrap of translations."""
    from tyro.conf import Positional

    def parse(runs: Positional[tuple[Path, ...]]) -> tuple[Path, ...]:
        """Compare runs with the first: intervals over seeds, bootstrap of translations.

        The intervals compare settings, such as norms; the bootstrap compares two trained models.

        Args:
            runs: Folders of runs, or folders that hold one run's seeds.
        """
        return runs

    runs = parse_arguments(parse, arguments, "compare")
    if not runs:
        raise ValueError("no run given; try `normkit compare runs/layer runs/un`")
    from normkit.lab.train.compare import compared

    write("\n".join(compared(runs)))
    return 0
