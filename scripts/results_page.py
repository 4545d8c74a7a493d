"""Write docs/results.md from the files in results/.

python scripts/results_page.py                write the page
python scripts/results_page.py runs/studies   first keep what these studies measured, in results/studies
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from normkit.lab.report import results, settings, summary
from normkit.lab.studies import table
from normkit.lab.studies.catalogue import STUDIES
from normkit.lab.study import Study

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
KEPT = ROOT / "results"
HEAD = """# Results

This page lists every kept measurement: studies, with the papers' numbers beside ours, then other runs, then studies
that were not run. `python scripts/results_page.py` generates it from the files in `results/`; do not edit it. Under
each table are the number of runs, seeds, device, commit and command. Scales are not comparable: `pocket` is minutes on
one CPU core, `gpu` ten minutes on one GPU, `paper` the original setting. Columns "donors" use the statistics of other
training items of the same lengths. Columns "own" and "of each test batch itself" (until 0.2) depend on the right
answers of that batch, and flatter norms that read its length.
"""


def keep(out: Path, kept: Path) -> None:
    """Copy tables of studies, and the results in them, to the folder that is committed."""
    tables = sorted(out.glob("*/tables/*.json"))
    if not tables:
        sys.exit(f"{out} holds no tables: name the --out of a `normkit study`")
    for path in tables:
        made = json.loads(path.read_text(encoding="utf8"))
        table.write(made, kept / "studies")
        for run in _runs(made):
            if (out / run["folder"] / results.FILE).is_file():
                target = kept / "studies" / run["folder"]
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(out / run["folder"] / results.FILE, target / results.FILE)


def _runs(made: table.Table) -> list[dict]:
    """All runs of a table, each once."""
    cells = [cell for row in made["rows"] for cell in row["cells"]]
    return list({run["folder"]: run for cell in cells for run in cell["runs"]}.values())


def page(kept: Path) -> str:
    """Write the page: studies that were run, other results, and studies that were not run."""
    made = [json.loads(path.read_text(encoding="utf8")) for path in sorted(kept.glob("studies/*/tables/*.json"))]
    measured = [table for table in made if _runs(table)]
    parts = [HEAD, *map(_study, measured)]
    for folder in sorted(path for path in kept.iterdir() if path.is_dir() and path.name != "studies"):
        found = {path.parent: results.read(path) for path in sorted(folder.rglob(results.FILE))}
        if found:
            parts.append(_others(folder.name, found))
    parts.append(_overview({(table["study"], table["scale"]) for table in measured}, kept / "studies"))
    return "\n".join(parts)


def _study(made: table.Table) -> str:
    title = f"## {made['study']}, {made['scale']}\n"
    lines = []
    for row in made["rows"]:
        runs = list({run["folder"]: run for cell in row["cells"] for run in cell["runs"]}.values())
        for command in dict.fromkeys(run.get("command", "") for run in runs):
            same = [run for run in runs if run.get("command", "") == command]
            lines.append([row["label"], *_provenance([run for run in same if "commit" in run]), _code(command)])
    return "\n".join([title, table.markdown(made, commands=False), _rows(["row", *PROVENANCE, "command"], lines)])


PROVENANCE = ("n", "seeds", "device", "commit", "minutes")


def _provenance(runs: list[dict]) -> list[str]:
    minutes = sorted(round(run["seconds"] / 60, 1) for run in runs if run.get("seconds"))
    return [
        str(len(runs)),
        ", ".join(dict.fromkeys("-" if run["seed"] is None else str(run["seed"]) for run in runs)),
        "; ".join(dict.fromkeys(f"{run['device']}, threads: {run['threads']}" for run in runs)),
        ", ".join(dict.fromkeys(_commit(run) for run in runs)),
        " to ".join(map(str, dict.fromkeys((minutes[0], minutes[-1])))) if minutes else "-",
    ]


def _commit(where: dict) -> str:
    return f"`{(where['commit'] or 'unknown')[:9]}`{' with local changes' if where['dirty'] else ''}"


def _code(command: str) -> str:
    return f"`{command}`" if command else "-"


def _others(name: str, found: dict) -> str:
    """Results that belong to no study: one table for each task and source of data."""
    parts = [f"## {name}\n"]
    for group in settings.groups(found):
        parts.append(f"{' on '.join(settings.job(next(iter(group.values()))))}\n")
        head, *lines = summary.cells(group)
        parts.append(_rows(head, lines))
        rows = []
        for label, result in zip(settings.labels(group).values(), group.values(), strict=True):
            run = {**result["where"], "seed": result["run"].get("seed", 0), "seconds": result["seconds"].get("train")}
            rows.append([label, *_provenance([run]), _code(result["command"])])
        parts.append(_rows(["row", *PROVENANCE, "command"], rows))
    return "\n".join(parts)


SCALES = ("pocket", "gpu", "paper")


def _overview(measured: set[tuple[str, str]], out: Path) -> str:
    """All studies, and the scales at which each was run, or partly by runs of other studies."""
    lines = []
    for name, study in STUDIES.items():
        scales = [scale for scale in SCALES if (name, scale) in measured]
        for scale in SCALES:
            if scale not in scales and (share := _shared(study, scale, out)):
                scales.append(f"{scale}, partly, by runs of other studies: {share} cells")
        lines.append([name, study.source or "our own question", study.title, "; ".join(scales) or table.NOT_YET])
    head = (
        "## All studies\n\n`normkit study NAME --show --out results/studies` shows any of them, with the paper's\n"
        "figures and ours. Many studies share runs: where a study has no runs, those of another one may fill\n"
        "some of its cells.\n"
    )
    return "\n".join([head, _rows(["study", "source", "title", "run at"], lines)])


def _shared(study: Study, scale: str, out: Path) -> str:
    """Number of cells of a study that kept runs fill, of those that it has.

    Nothing where there is none.
    """
    cells = [cell for row in table.collect(study, scale, out)["rows"] for cell in row["cells"] if cell["ours"]]
    filled = sum(bool(cell["n"]) for cell in cells)
    return f"{filled} of {len(cells)}" if filled else ""


def _rows(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [[re.sub(r"([|])", r"\\\1", str(cell)) for cell in line] for line in (head, *lines)]
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in (rows[0], rule, *rows[1:])) + "\n"


if __name__ == "__main__":
    for out in sys.argv[1:]:
        keep(Path(out), KEPT)
    PAGE.write_text(page(KEPT), encoding="utf8")
