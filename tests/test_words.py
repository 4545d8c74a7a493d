"""Plain words: the private vocabulary of earlier versions does not come back.

Docstrings begin with a summary.
"""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPLACED = (  # word that we replaced: the field's term
    ("room", "package"),
    ("dear", "expensive"),
    ("stray", "drift"),
    ("refuse_\\w+", "check_\\w+"),
    ("spoilt?", "corrupted"),
    ("anew", "again"),
    ("felt", "grad_sums"),
    ("slant", "dy_coefficient"),
    ("foretold", "known in advance"),
    ("fate", "outcome"),
    ("glimpse", "AsyncCounter"),
    ("mirror(ed)?", "kernel_rule; for images: flipped"),
    ("nobody|somebody|anybody|everybody", "the actor's name, or the passive voice"),
    ("_tells_all", "has_kernel_rule"),
    ("says|tells|told|knows|wants|hears|heard", "a verb of what the program does: has, records, returns, needs"),
)
WORDS = re.compile(rf"\b({'|'.join(word for word, _ in REPLACED)})s?\b", re.IGNORECASE)
HISTORY = {"CHANGELOG.md", "tests/test_words.py", "docs/compatibility.md"}  # old words, and recorded messages
QUESTION = re.compile(r"(What|Whether|How|Who|Where)\b")
LONGEST = 88


def tracked(*suffixes: str) -> list[str]:
    """Return the tracked files with these suffixes, generated results apart."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [name for name in listed if name.endswith(suffixes) and not name.startswith("results/")]


@pytest.fixture(scope="module", autouse=True)
def in_a_checkout():
    if not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git")


def test_replaced_words_do_not_come_back():
    found = []
    for name in tracked(".py", ".md", ".h", ".cpp", ".toml", ".yml", ".j2"):
        if name in HISTORY:
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf8").splitlines(), 1):
            found += [f"{name}:{number}: {match[0]}" for match in WORDS.finditer(line)]
    assert not found, "replace (see REPLACED): " + ", ".join(found[:20])


def test_docstrings_begin_with_a_short_summary():
    wrong = []
    for name in tracked(".py"):
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = (ast.get_docstring(node) or "").split("\n")[0]
            if len(first) > LONGEST or QUESTION.match(first):
                wrong.append(f"{name}: {first}")
    assert not wrong, f"at most {LONGEST} characters, imperative or a noun phrase:\n" + "\n".join(wrong[:20])
