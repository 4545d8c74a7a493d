"""Write docs/laws.md, the table of laws and norms, from a run of the tests."""

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

This page shows the laws that the tests check for every norm. `make laws` generates it from a run of the tests.
A cell counts the cases that passed (variants of options, types, modes). `-` means that a law does not apply to the
norm, **failed** that a case failed. The laws are in `tests/test_laws.py`, `test_state.py` and `test_sync.py`,
one function each; those about formulas and released code are in `test_formulas.py` and `test_released.py`.

"""


def run() -> dict[str, dict[str, list[bool]]]:
    """Run the tests; return the outcomes by law and norm, without skipped cases."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [str(HERE / name) for name in FILES]
    # first what takes seconds: everything imports, and every norm has its formulas
    quick = [*pytest, str(HERE / "test_formulas.py"), "-k", "has_formulas or is_in_the_table"]
    for command in ([*pytest, "--collect-only", "-qq", *files], quick):
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"{PAGE.name} is unchanged: mend the error above, then run this again")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        status = subprocess.run([*pytest, "-o", "junit_family=xunit1", f"--junitxml={report}", *files], check=False)
        if status.returncode > 1 or not report.exists():  # 1: some cases failed, and the table shows them
            sys.exit(f"{PAGE.name} is unchanged: pytest ended with status {status.returncode}")
        return read(report)


def read(report: pathlib.Path) -> dict[str, dict[str, list[bool]]]:
    """Read the outcomes from a JUnit report."""
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
    """Return the page as Markdown."""
    from normkit.norms import NORMS

    lines = [f"| law | {' | '.join(f'`{name}`' for name in NORMS)} |", "|---" * (len(NORMS) + 1) + "|"]
    for law, row in sorted(table.items()):
        cells = ["-" if name not in row else str(len(row[name])) if all(row[name]) else "**failed**" for name in NORMS]
        lines.append(f"| {law} | {' | '.join(cells)} |")
    cases = [ok for row in table.values() for results in row.values() for ok in results]
    return HEAD + "\n".join(lines) + f"\n\n{sum(cases)} of {len(cases)} cases passed.\n"


if __name__ == "__main__":
    table = run()
    PAGE.write_text(render(table))
    print(f"wrote {PAGE}")
    sys.exit(not all(all(cases) for row in table.values() for cases in row.values()))
