"""What the site builds itself: formulas as MathML, the reference, and tables of recorded quantities and of results."""

import csv
import html
import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from normkit_papers.report.verdicts import ABOUT, judge, ran
from normkit_papers.studies.catalogue import OF_PAPERS, STUDIES
from normkit_papers.studies.rows import known
from normkit_papers.studies.table import build, grid, remarks

import normkit
from normkit.watch import QUANTITIES, THRESHOLDS

LONG, WIDE = 40, 60  # rows of a table that is shown open, characters of a cell
ORIGIN = ("device", "threads", "torch", "torchao", "commit", "command")  # columns that stay in the files
ROOT = Path(__file__).parents[1]
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
PERCENT = re.compile(r"(?<=\d) %")
# lines that say in a clone where the numbers are, and here give way to a table; file: columns; rows with a value
RESULT = re.compile(r"^.*<!-- table (\w+):((?: \w+)+)(?:; (\w+)=([\w .-]+))? -->$", re.MULTILINE)
STUDY = re.compile(r"^.*<!-- study ([\w.-]+) -->$", re.MULTILINE)
GROUPS = {  # heading of the reference: package of the names below it
    "Models": "normkit.models", "Folding": "normkit.fold", "Removal": "normkit.removal", "Watching": "normkit.watch",
    "Norms": "normkit.norms", "Kernels": "normkit.kernels",
}  # fmt: skip


def on_page_content(content: str, **_: object) -> str:
    """Replace formulas by MathML, so that pages need no script, and keep percent signs with numbers."""
    return PERCENT.sub("\u00a0%", FORMULA.sub(_mathml, content))


def _mathml(formula: re.Match[str]) -> str:
    shown = convert(html.unescape(formula[3]), display="inline" if formula[2] == "(" else "block")
    return shown if formula[2] == "(" else f'<div class="formula">{shown}</div>'


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Write pages of docstrings and tables, and put tables of results where a page asks for them."""
    made = {"reference": reference, "quantities": quantities, "results": results, "measurements": measured}
    if page.file.name in made:
        return made[page.file.name]()
    markdown = STUDY.sub(lambda m: "\n".join(study(m[1])), markdown)
    return RESULT.sub(lambda m: "\n".join(result(m[1], m[2].split(), m[3], m[4])), markdown)


def on_config(config: Any) -> None:
    """List the pages of the norms in the order of NORMS."""
    section = next(entry for entry in config.nav if "Norms" in entry)
    section["Norms"] = [{name: f"norms/{name}.md"} for name in normkit.NORMS] + section["Norms"]


def reference() -> str:
    """The public names, each with its docstring, by package."""
    lines = ["# Reference", "", "`import normkit as nk`: the names that `dir(nk)` lists, and what they return."]
    for heading, package in GROUPS.items():
        module = importlib.import_module(package)
        names = getattr(module, "__all__", ("kernels", "keep_statistics"))
        things = [getattr(module, name, None) or getattr(normkit, name) for name in names]
        lines += ["", f"## {heading}"]
        paths = [
            f"{each.__module__}.{each.__qualname__}" for each in things if hasattr(each, "__qualname__")
        ]  # no tables
        paths += ["normkit.watch.lightning.Watch"] if heading == "Watching" else []  # to import it takes Lightning
        for path in paths:
            lines += ["", f"::: {path}"]
    return "\n".join(lines)


def quantities() -> str:
    """The recorded quantities and the limits of the checks."""
    recorded = [(f"`{key}`", q.definition, q.source, "" if q.expensive else "yes") for key, q in QUANTITIES.items()]
    limits = [(f"`{key}`", f"{limit.value:g}", limit.meaning) for key, limit in THRESHOLDS.items()]
    lines = ["# Recorded quantities", ""]
    lines += ["`normkit.record(model, quantities=[...])` records these of every norm; `normkit.diagnose` checks them."]
    lines += ["[Find out why training fails](guides/diagnose.md) shows both.", ""]
    lines += table(("quantity", "definition", "source", "default"), recorded)
    lines += ["", "## Limits of the checks", "", *table(("limit", "value", "meaning"), limits)]
    return "\n".join(lines)


def measured() -> str:
    """The files of benchmarks/results as tables; long ones closed, the one on compatibility summed up by norm."""
    lines = [
        "# Measurements",
        "",
        (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf8").split("\n", 2)[2],
    ]
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.csv")):
        with path.open(encoding="utf8", newline="") as file:
            head, *rows = csv.reader(file)
        shown = [place for place, title in enumerate(head) if title not in ORIGIN]
        name = path.relative_to(ROOT / "benchmarks" / "results").with_suffix("").as_posix()
        lines += ["", f"## {name}", ""]
        if name == "compatibility":
            lines += [*_by_norm([dict(zip(head, row, strict=True)) for row in rows]), ""]
        if name == "deploy":
            lines += [*_best([dict(zip(head, row, strict=True)) for row in rows]), ""]
        closed = len(rows) > LONG
        cells = [[row[place] for place in shown] for row in (head, *rows)]
        cells = [[cell if len(cell) < WIDE else cell[:WIDE] + " ..." for cell in row] for row in cells]
        cells = table([title.replace("_", " ") for title in cells[0]], cells[1:])
        lines += [f'??? note "all {len(rows)} rows"', "", *(f"    {line}" for line in cells)] if closed else cells
    return "\n".join(lines)


def _by_norm(rows: list[dict[str, str]]) -> list[str]:
    """Sum up what folding makes of all architectures, by norm."""
    counted = ("norms", "gone", "gain", "affine", "kept", "rms")
    sums = []
    for spec in dict.fromkeys(row["spec"] for row in rows):
        of = [row for row in rows if row["spec"] == spec and not row["failed"]]
        worst = max((float(row["error"]) for row in of if row["error"]), default=0.0)
        sums.append([spec, len(of), *(sum(int(row[key] or 0) for row in of) for key in counted), f"{worst:.0e}"])
    head = (
        "converted to, or option", "models", "norms", "gone", "gains folded", "multiply-adds left", "kept",
        "now RMSNorm", "largest error",
    )  # fmt: skip
    return table(head, sums)


def _best(rows: list[dict[str, str]]) -> list[str]:
    """The fastest model with LayerNorm and without norms, of those near the original."""
    lines = []
    for model, threads in dict.fromkeys((row["model"], row["threads"]) for row in rows):
        near = [
            row for row in rows if (row["model"], row["threads"]) == (model, threads) and float(row["likeness"]) > 0.9
        ]
        sides = [[row for row in near if (row["norm"] == "layer") is layer] for layer in (True, False)]
        best = [min(side, key=lambda row: float(row["ms"])) for side in sides]
        shown = [f"{row['norm']}, {row['scheme']}: {row['ms']} ms, likeness {row['likeness']}" for row in best]
        lines.append([model, threads, *shown, f"{float(best[1]['ms']) / float(best[0]['ms']):.2f}"])
    return table(("model", "threads", "fastest with LayerNorm", "fastest without", "ratio"), lines)


def results() -> str:
    """The papers' claims with our verdicts, and the table of each study that has run, from papers/results."""
    lines = [
        "# Results",
        "",
        "Each table and figure of the three papers: its claim, what was run here, and a verdict.",
        "",
    ]
    lines += [ABOUT, "`papers study NAME` runs or continues a table; [Reproduce the papers](guides/papers.md) explains"]
    lines += ["the scales.", ""]
    verdicts, tables, ours = list[list[str]](), list[str](), list[str]()
    for name in OF_PAPERS:
        for scale in ("gpu", "pocket"):
            rows, path = known(STUDIES[name], scale, ROOT / "runs" / "none")
            made = build(STUDIES[name], scale, rows)
            if path is None or not made.runs:
                continue
            tables += ["", f"## {name}, {scale}", "", STUDIES[name].title, "", *table(*_split(grid(made)))]
            tables += ["", *(f"- {html.escape(line, quote=False)}" for line in remarks(made))]
            verdict, reasons = judge(made)
            tables += [f"- Verdict: {verdict}.", *(f"    - {reason}" for reason in reasons)]
            verdicts.append([f"{name}, {scale}", verdict, STUDIES[name].claim, ran(made)])
    missing = [name for name in OF_PAPERS if not any(row[0].startswith(f"{name},") for row in verdicts)]
    lines += table(("study", "verdict", "claim of the paper", "what ran"), verdicts)
    lines += ["", f"Not run: {', '.join(missing)}."] if missing else []
    for name in (each for each in STUDIES if each not in OF_PAPERS):
        rows, path = known(STUDIES[name], "pocket", ROOT / "runs" / "none")
        if path is not None:
            made = build(STUDIES[name], "pocket", rows)
            ours += ["", f"### {name}", "", STUDIES[name].title, "", *table(*_split(grid(made)))]
            ours += ["", *(f"- {html.escape(line, quote=False)}" for line in remarks(made))]
    return "\n".join([*lines, *tables, "", "## Our own studies", *ours])


def _split(lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Join the two lines above a grid into one heading."""
    first, second, *rest = lines
    return [f"{a} {b}".strip() for a, b in zip(first, second, strict=True)], rest


def result(name: str, columns: list[str], key: str | None = None, value: str | None = None) -> list[str]:
    """Columns of a file of benchmarks/results, and of its rows all or those with a value."""
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if key is None or row[key] == value]
    return table([each.replace("_", " ") for each in columns], ([row[each] for each in columns] for row in rows))


def study(name: str) -> list[str]:
    """The table of a study of ours at pocket scale, from papers/results."""
    rows, _ = known(STUDIES[name], "pocket", ROOT / "runs" / "none")
    head, _, *lines = grid(build(STUDIES[name], "pocket", rows))
    return table(head, lines)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table."""
    head = list(head)
    lines = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (head, ["---"] * len(head), *rows))
    return [f"| {line.replace('<', '&lt;')} |" for line in lines]
