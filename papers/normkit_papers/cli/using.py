"""Commands that use a trained model: `pronounce` and `translate`."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from normkit._util import escape
from normkit_papers.cli.line import command, complain, write


@command
def pronounce(words: tuple[str, ...], /, run: Path | None = None) -> int:
    """Print the sounds of words, one word a line, predicted by a model of the demo.

    Args:
        words: Words to pronounce, letters and apostrophes.
        run: Folder of the run; the default is the best run in runs/demo.
    """
    if not words:
        raise ValueError("no word given; try `normkit pronounce transformer`")
    from normkit_papers.inference import best, pronounce

    folder = run or best(Path("runs/demo"))
    if run is None:
        sys.stderr.write(f"using {escape(str(folder))}\n")
    width = max(map(len, words))
    for word, sounds in zip(words, pronounce(folder, words), strict=True):
        write(f"{word:<{width}}  {' '.join(sounds)}")
    return 0


@command
def translate(run: Path, /) -> int:
    """Translate lines of standard input with the model of a run; input and output are UTF-8.

    For a run of task g2p, a line is a word.

    Args:
        run: Folder of the run.
    """
    from normkit_papers.inference import translate_lines

    with contextlib.suppress(AttributeError):  # standard output may be closed, or no file
        sys.stdout.reconfigure(encoding="utf8")  # type: ignore[attr-defined]  # as the input
    for line in translate_lines(run, _lines(sys.stdin.buffer), complain):
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
