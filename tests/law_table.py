"""Write docs/laws.md, the table method x law, from a run of the law tests: `python tests/law_table.py`."""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).parent
FILES = ["test_laws.py", "test_state.py", "test_sync.py", "test_formulas.py", "test_released.py"]
PAGE = HERE.parent / "docs" / "laws.md"
HEAD = """# Laws

What is tested for every norm of the table, generated from a run of the tests by `python tests/law_table.py`.
A cell counts the cases that passed (variants of options, types, modes); `-` where a law does not concern a method
and **failed** where a case failed. The laws themselves are in `tests/test_laws.py`, `test_state.py` and `test_sync.py`,
one function each; agreement with formulas and released code in `test_formulas.py` and `test_released.py`.

"""


def run() -> dict[str, dict[str, list[bool]]]:
    """law -> norm -> whether each case passed; skipped cases do not count."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        files = [str(HERE / name) for name in FILES if (HERE / name).exists()]
        how = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *how, *files], check=False)
        return read(report)


def read(report: pathlib.Path) -> dict[str, dict[str, list[bool]]]:
    """The table out of a JUnit report."""
    from normkit.norms import NORMS

    table: dict[str, dict[str, list[bool]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        match = re.fullmatch(r"test_(\w+?)(?:\[(.*)\])?", case.get("name", ""))
        if match is None or case.find("skipped") is not None:
            continue
        specs = [each.get("value", "") for each in case.iter("property") if each.get("name") == "norm"]
        for spec in specs or [match[2] or ""]:
            words = re.findall(r"[a-z]+", spec.split("(")[0])
            norm = next((word for word in reversed(words) if word in NORMS), None)
            if norm:
                law = match[1].replace("_", " ")
                table[law][norm].append(case.find("failure") is None and case.find("error") is None)
    return table


def render(table: dict[str, dict[str, list[bool]]]) -> str:
    """The page as Markdown."""
    from normkit.norms import NORMS

    lines = [f"| law | {' | '.join(f'`{name}`' for name in NORMS)} |", "|---" * (len(NORMS) + 1) + "|"]
    for law, row in sorted(table.items()):
        cells = ["-" if name not in row else str(len(row[name])) if all(row[name]) else "**failed**" for name in NORMS]
        lines.append(f"| {law} | {' | '.join(cells)} |")
    cases = [ok for row in table.values() for results in row.values() for ok in results]
    return HEAD + "\n".join(lines) + f"\n\n{sum(cases)} of {len(cases)} cases passed.\n"


if __name__ == "__main__":
    PAGE.write_text(render(run()))
