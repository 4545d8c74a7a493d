"""Put measured files into the README, so that no figure in it is typed by hand.

python scripts/measured.py             between the marks `<!-- measured: PATH -->` and `<!-- /measured -->` of the README
python scripts/measured.py runs/demo   first keep what this demo measured, in results/demo
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KEPT = ("table.txt", "curves.png", "statistics.png", "*/result.json")
PLACE = re.compile(r"<!-- measured: (\S+) -->\n.*?<!-- /measured -->", re.DOTALL)


def keep(run: Path, folder: Path) -> None:
    """Copy what a demo measured, without its models, to the folder that is committed."""
    if not (run / "table.txt").is_file():
        sys.exit(f"{run} holds no table.txt: name the folder of a finished `normkit demo`")
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in KEPT:
        for path in run.glob(pattern):
            target = folder / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def fill(text: str) -> str:
    """The page with every place filled: a picture is shown, any other file is quoted."""

    def content(match: re.Match) -> str:
        path = ROOT / match[1]
        if not path.is_file():
            body = "*Not measured yet.*"
        elif path.suffix in (".png", ".svg"):
            body = f"![{path.stem}]({match[1]})"
        else:
            body = f"```\n{path.read_text(encoding='utf8').strip(chr(10))}\n```"
        return f"<!-- measured: {match[1]} -->\n{body}\n<!-- /measured -->"

    return PLACE.sub(content, text)


if __name__ == "__main__":
    for run in sys.argv[1:]:
        keep(Path(run), ROOT / "results" / "demo")
    README.write_text(fill(README.read_text(encoding="utf8")), encoding="utf8")
