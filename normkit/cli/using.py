"""Commands that use a trained model: `pronounce` and `translate`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from normkit.cli.line import complain, parse_arguments, write


def pronounce(arguments: list[str]) -> int:
    """Pronounce words with a model of the demo."""
    from tyro.conf import Positional

    def parse(words: Positional[tuple[str, ...]], run: Path | None = None) -> dict[str, Any]:
        """Pronounce words with a trained model, one a line.

        Args:
            words: Words to pronounce, letters and apostrophes.
            run: Folder of the run to use; the best one of runs/demo unless said otherwise.
        """
        return locals()

    given = parse_arguments(parse, arguments, "pronounce")
    if not given["words"]:
        raise ValueError("no word given; try `normkit pronounce transformer`")
    from normkit.lab.studies.inference import best, pronounce

    folder = given["run"] or best(Path("runs/demo"))
    if given["run"] is None:
        sys.stderr.write(f"using {folder}\n")
    width = max(map(len, given["words"]))
    for word, sounds in zip(given["words"], pronounce(folder, given["words"]), strict=True):
        write(f"{word:<{width}}  {' '.join(sounds)}")
    return 0


def translate(arguments: list[str]) -> int:
    """Translate lines of standard input with the model of a run."""
    from tyro.conf import Positional

    def parse(run: Positional[Path]) -> Path:
        """Translate lines of standard input with a trained model, line by line: for g2p, a word a line.

        Args:
            run: Folder of the run.
        """
        return run

    folder = parse_arguments(parse, arguments, "translate")
    from normkit.lab.studies.inference import translate_lines

    for line in translate_lines(folder, _lines(sys.stdin.buffer), complain):
        write(line)
        sys.stdout.flush()
    return 0


def _lines(binary: Iterable[bytes]) -> Iterator[str]:
    """Lines of UTF-8, whatever the terminal's encoding is; ValueError, with its number, for one that is not."""
    for number, line in enumerate(binary, 1):
        try:
            yield line.decode("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} of standard input is not UTF-8: {error.reason} at byte {error.start}; convert it, as "
                "with `iconv -f latin1 -t utf8`"
            ) from None
