"""The documentation runs: Python blocks of pages, and examples. `mkdocs build --strict` checks links."""

import contextlib
import pathlib
import re
import runpy
import sys

import pytest
from torchvision_stub import load_torchvision

import normkit

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: pathlib.Path) -> list[str]:
    """The Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _as_before():
    """Pages and examples may add norms; transformers looks for torchvision."""
    load_torchvision()
    before = dict(normkit.NORMS)
    yield
    normkit.NORMS.clear()
    normkit.NORMS.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "transformers" in page.read_text(encoding="utf8") and page.parent.name == "guides":
        pytest.importorskip("accelerate")
    names: dict = {}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with contextlib.suppress(SystemExit):  # what it needs is not installed
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_pages_keep_their_limits():
    """README at most 90 lines, a how-to 600 words, all pages 28,000."""
    words = {page: len(page.read_text(encoding="utf8").split()) for page in (ROOT / "docs").rglob("*.md")}
    assert len((ROOT / "README.md").read_text(encoding="utf8").splitlines()) <= 90
    assert {page.name: n for page, n in words.items() if page.parent.name == "guides" and n > 600} == {}
    assert sum(words.values()) <= 28_000
