"""Commands that use a trained model: `pronounce` and `translate`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from normkit.cli.line import complain, parse_arguments, write


def pronounce(arguments: list[str]) -> int:
    """Print the sounds of words, predicted by a model of the demo."""
    from tyro.conf import Positional

    def parse(words: Positional[tuple[str, ...]], run: Path | None = None) -> dict[str, Any]:
        """Print the sounds of words, one word a line, predicted by a trained model.

        Args:
            words: Words to pronounce, letters and apostrophes.
            run: Folder of the run; the default is the best run in runs/demo.
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
        """Translate standard input line by line with a trained model.

        For a run of task g2p, a line is a word.

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
    """Decode lines as UTF-8, whatever the terminal's encoding; ValueError names a bad line."""
    for number, line in enumerate(binary, 1):
        try:
            yield line.decode("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} of standard input is not UTF-8: {error.reason} at byte {error.start}; convert it, as "
                "with `iconv -f latin1 -t utf8`"
            ) from None
