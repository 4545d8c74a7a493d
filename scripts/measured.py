"""Fill the measured tables of the pages below from the files in results/.

No figure in it is typed by hand.

python scripts/measured.py             # fill the marks `<!-- measured: NAME -->` ... `<!-- /measured -->`
python scripts/measured.py runs/demo   # copy the results of this demo to results/demo first
"""

import json
import re
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from normkit.lab.report import markdown
from normkit.lab.report.seeds import interval

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "choosing.md", ROOT / "docs" / "log.md")
DEMO = ROOT / "results" / "demo"
TABLES = ROOT / "results" / "studies" / "pocket" / "tables"
FOLDED, CALIBRATED = (ROOT / "results" / f"folded-{name}.json" for name in ("multi30k", "calibrated"))
KEPT = ("table.txt", "curves.png", "statistics.png", "*/result.json")


def keep(run: Path, folder: Path) -> None:
    """Copy the results of a demo, without its models, to the folder that is committed."""
    if not (run / "table.txt").is_file():
        sys.exit(f"{run} holds no table.txt: name the folder of a finished `normkit demo`")
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in KEPT:
        for path in run.glob(pattern):
            target = folder / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def demo() -> str:
    """Format the demo as a table.

    Error rates, norms left after folding, time against LayerNorm.
    """
    results = [json.loads(path.read_text(encoding="utf8")) for path in DEMO.glob("*/result.json")]
    lines = []
    for result in sorted(results, key=lambda result: result["scores"]["running"]["per"]):
        model, scores = result["run"]["model"], result["scores"]
        name = re.sub(r"(, )?warmup=[\w']+", "", model["norm"]).replace("()", "") + (
            " + FixNorm" if model["fixnorm"] else ""
        )
        gone, _, total = result["fold"]["foldable"].partition(" of ")
        folded = f"{scores['folded']['per']:.1f} %" if "folded" in scores else ""
        pairs = (result.get("timing") or {}).get("pairs", [])
        times = [f"{p['ratio']:.2f} ({p['low']:.2f} to {p['high']:.2f})" for p in pairs if p["b"] == "layer"]
        time = times[0] if times and folded else ""
        left = int(total) - int(gone)
        lines.append([f"`{name}`", f"{scores['running']['per']:.1f} %", folded, f"{left} of {total}", time])
    run, where = results[0]["run"], results[0]["where"]
    device = where["device"].replace("(R)", "")
    head = ["norm", "phonemes wrong", "after folding", "norms left, folded"]
    return "\n".join([
        markdown.table([*head, "time of inference, folded / LayerNorm"], lines),
        "",
        *textwrap.wrap(
            f"Spelling to sound (CMUdict), a Transformer with 0.4 M parameters, {run['steps']:,} steps, 2,000 "
            f"test words, one seed, one thread of an {device}, commit {where['commit'][:7]}. "
            "The sampling error of a rate is 0.35. `make demo` reproduces it in six to fifteen minutes, depending on "
            "the CPU. Phonemes wrong are substitutions, deletions and insertions per phoneme of the reference, so that "
            "there can be more than 100 %; why `batch` fails is [below](#rules-that-we-measured). Times: median ratio, "
            "20th to 80th percentile.",
            120,
        ),
    ])  # fmt: skip


def multi30k(seeds: int = 1) -> str:
    """Format BLEU of short and of long runs on Multi30k.

    Of long runs also the difference from LayerNorm, and BLEU after folding.

    Args:
        seeds: Fewest seeds of a long run in a row; 1 for all rows, those without long runs too.
    """
    core, long = (
        json.loads((TABLES / f"{name}.json").read_text(encoding="utf8"))["rows"]
        for name in ("core.multi30k", "core.multi30k-hour")
    )
    short = {row["label"]: row["cells"][0] for row in core if row["cells"][0].get("n", 0) > 1}
    after = {row["label"]: row["cells"][0] for row in long if row["cells"][0].get("n")}
    lines = []
    for label in dict.fromkeys([*short, *(name for name in after if name != "un")]):  # "un" warms up by hand
        cell = after.get(label, {})
        if seeds > 1 and cell.get("n", 0) < seeds:
            continue
        folded = _folded(cell, FOLDED)
        pieces = [_mean(short.get(label, {})), _mean(cell), _difference(cell, after["layer"]), _mean(folded)]
        lines.append([f"`{label}`", *pieces])
    return "\n".join([
        markdown.table(["norm", "1,600 steps", "10,000 steps", "minus `layer`", "folded"], lines),
        "",
        "Mean ± standard deviation (seeds); difference of runs of the same seed with its 95 % interval (Student's t).",
        *(["Without `warmup=auto`, statistics warm up as long as the learning rate."] if seeds == 1 else []),
        "`normkit study core.multi30k`, `core.multi30k-hour`; `python benchmarks/folded_scores.py RUN...`.",
    ])  # fmt: skip


def ted() -> str:
    """Format BLEU of long runs on TED gl-en.

    Of norms that fold also after calibration and folding, and the difference of that from LayerNorm.
    """
    rows = json.loads((TABLES / "core.ted-gl-long.json").read_text(encoding="utf8"))["rows"]
    trained = {row["label"]: row["cells"][0] for row in rows if row["cells"][0].get("n")}
    lines = []
    for label, cell in trained.items():
        folded = _folded(cell, CALIBRATED)
        base = trained["layer + FixNorm" if "FixNorm" in label else "layer"]
        lines.append([f"`{label}`", _mean(cell), _mean(folded), _difference(folded, base)])
    return "\n".join([
        markdown.table(["norm", "BLEU", "calibrated and folded", "minus LayerNorm"], lines),
        "",
        "As above; the difference is that of the calibrated model from `layer`, with FixNorm from `layer + FixNorm`.",
        "`normkit study core.ted-gl-long`; `python benchmarks/folded_scores.py --calibrate RUN...`.",
    ])  # fmt: skip


def _folded(cell: dict, file: Path) -> dict:
    """The scores of these runs after folding."""
    scores = {row["run"]: row["folded"] for row in json.loads(file.read_text(encoding="utf8"))}
    runs = [{**run, "value": scores[run["folder"]]} for run in cell.get("runs", ()) if run["folder"] in scores]
    values = [run["value"] for run in runs]
    if not values:
        return {}
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"runs": runs, "n": len(values), "mean": statistics.fmean(values), "spread": spread}


def _difference(cell: dict, base: dict) -> str:
    """The mean difference over the seeds that both have."""
    ours, theirs = ({run["seed"]: run["value"] for run in each.get("runs", ())} for each in (cell, base))
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if cell is base or len(pairs) < 2:
        return ""
    mean, half = interval(pairs)
    return f"{mean:+.1f} ± {half:.1f}"


def _mean(cell: dict, digits: int = 1) -> str:
    if not cell.get("n"):
        return ""
    spread = f" ± {cell['spread']:.{digits}f}" if cell.get("spread") is not None else ""
    return f"{cell['mean']:.{digits}f}{spread} ({cell['n']})"


def deploy() -> str:
    """Format the times of folded models in float32 and in integers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import deploy_page

    return deploy_page.headline()


def length(study: str, metric: str) -> str:
    """Format scores and losses with statistics of donors: mean, deviation, seeds."""
    made = json.loads((TABLES / f"{study}.json").read_text(encoding="utf8"))
    places = {column["title"]: place for place, column in enumerate(made["columns"])}
    titles = [title.removeprefix(f"{metric}, ") for title in places if title.startswith(metric)]
    lines = []
    for row in made["rows"]:
        cells = []
        for title in titles:
            kinds = [places[name] for name in (f"{metric}, {title}", f"loss, {title}") if name in places]
            found = [_mean(row["cells"][place], 1 + number) for number, place in enumerate(kinds)]
            cells.append(re.sub(r" \(1\)", "", "; ".join(found)) or "-")
        if cells[0].strip("; -"):
            norm, _, way = row["label"].rpartition(", ")
            same = not row["cells"][places["symbols, same lengths"]]["n"]  # no donors: the norm keeps no statistics
            lines.append([f"`{norm}`, {way}", cells[0], *("=" if same else each for each in cells[1:])])
    return markdown.table(["norm, batches", *titles], lines)


def advice() -> str:
    """Format the runs by which the rule of `normkit.watch.advise` was fitted and tested."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import advice

    return advice.show(json.loads(advice.FILE.read_text(encoding="utf8")))


TABLE: dict[str, Callable[[], str]] = {
    "advice": advice,
    "demo": demo,
    "deploy": deploy,
    "length": lambda: length("length.cmudict", "PER"),
    "length.iwslt14": lambda: length("length.iwslt14", "BLEU"),
    "length.multi30k": lambda: length("length.multi30k", "BLEU"),
    "multi30k": multi30k,
    "multi30k-long": lambda: multi30k(seeds=3),
    "ted": ted,
}


def fill(text: str) -> str:
    """Return the page with every marked place filled."""
    return markdown.fill(text, lambda name: TABLE[name]())


if __name__ == "__main__":
    for run in sys.argv[1:]:
        keep(Path(run), DEMO)
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf8")), encoding="utf8")
