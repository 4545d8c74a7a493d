"""The documentation runs: Python blocks of pages, examples, links, generated pages."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from forked import Program

import normkit
from normkit.cli import COMMANDS
from normkit.lab.models.torchvision_ops import load_torchvision
from normkit.lab.report import markdown
from normkit.watch import THRESHOLDS

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: pathlib.Path) -> list[str]:
    """The Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL)


WITH_BLOCKS = [page for page in PAGES if blocks(page) and page.parent.name != "api"]  # those hold signatures


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "transformers" in page.read_text(encoding="utf8") and page.parent.name == "guides":
        pytest.importorskip("accelerate")
        load_torchvision()  # transformers imports it
    names: dict = {}
    before = dict(normkit.NORMS)
    try:
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    finally:  # pages may add norms
        normkit.NORMS.clear()
        normkit.NORMS.update(before)


def test_the_readme_has_blocks_to_run():
    assert blocks(ROOT / "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    code, out, err = Program(path.read_text(encoding="utf8"), cwd=tmp_path).ended()
    assert code == 0, err[-2000:]
    assert out


def test_reference_pages_are_those_of_the_docstrings():
    done = subprocess.run(
        [sys.executable, "scripts/api_pages.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(path.read_text(encoding="utf8") for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^### (\w+) \{#normkit\.", pages, re.MULTILINE))
    assert set(normkit.__all__) <= documented | {"NORMS"}


def test_every_norm_has_its_page():
    for name, kind in normkit.NORMS.items():
        page = ROOT / "docs" / "norms" / f"{name}.md"
        assert page.is_file(), f"docs/norms/{name}.md is missing"
        anchor = f"(../api/norms.md#{kind.__module__}.{kind.__name__})"
        assert anchor in page.read_text(encoding="utf8"), f"{page.name} does not link to {anchor}"


def test_links_between_pages_have_targets():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_of_links_are_defined_and_used(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
    assert set(re.findall(r"\]\[([^\]\n]+)\]", text)) == set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))


def test_the_tables_of_laws_name_every_norm():
    head = (ROOT / "docs" / "laws.md").read_text(encoding="utf8")
    assert all(f"`{name}`" in head for name in normkit.NORMS), "run `make laws`"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_and_log_figures_match_result_files():
    measured = script("measured")
    for page in measured.PAGES:
        text = page.read_text(encoding="utf8")
        assert markdown.PLACE.search(text)
        assert text == measured.fill(text), "run `python scripts/measured.py`"


def test_tables_of_speed_match_result_files():
    speed = script("speed_page")
    text = speed.PAGE.read_text(encoding="utf8")
    assert text == speed.filled(text), "run `python scripts/speed_page.py`"


def test_the_rule_of_advise_is_the_fitted_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import advice

    fitting, test = advice.halves(json.loads(advice.FILE.read_text(encoding="utf8")))
    threshold = advice.fit(fitting)
    assert round(threshold, 2) == THRESHOLDS["target_share"].value, "edit THRESHOLDS and docs/watch.md"
    right, known = advice.right(test, threshold)
    assert known >= 0.9 * len(test), "a rule that predicts little"
    assert right >= 0.9 * known, "advise must not predict"


def test_every_command_has_its_line():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf8")
    assert {name for name in COMMANDS if f"normkit {name}" not in text} == set()
