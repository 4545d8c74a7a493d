"""Studies: grids of runs, printed figures, tables. Runs may fail or be interrupted."""

import dataclasses
import json
import math
import re

import pytest
from made_results import result
from normkit_papers.metrics import STUDY_METRICS
from normkit_papers.report import results
from normkit_papers.studies import runner, table
from normkit_papers.studies.catalogue import RECIPES, STUDIES
from normkit_papers.studies.progress import Board
from normkit_papers.studies.workers import Workers
from normkit_papers.study import (
    SCALES,
    Base,
    Column,
    Row,
    Study,
    Times,
    expand,
    override,
    seeded,
    unique,
    warmed,
)
from normkit_papers.train.folder import locked
from rich.console import Console

from normkit.norms import make, parse

TINY = {"steps": 6, "batch_tokens": 120, "test_items": 8, "valid_every": 3, "checkpoint_every": 2, "warmup": 2}
BASE = {
    "pocket": Base("tiny", RECIPES["g2p_cmudict"], TINY),
    "paper": Base("tiny", RECIPES["g2p_cmudict"], {**TINY, "steps": 9}),
}
COLUMNS = (
    Column(title="PER", metric="per", base=BASE),
    Column(title="PER, shuffled", metric="per running", base=BASE, settings={"bucketing": False}),
    Column(title="pictures", metric="accuracy"),
)
ROWS = (
    Row(label="theirs", settings=None, printed=("9.0", "/", "80.0")),
    Row(label="LN", settings={}, printed=("10.0", "10.5", "81.3")),
    Row(label="UN", settings={"model.norm": "un"}, printed=("11.0*", "FAIL", "81.0")),
)
TOY = Study(id="toy", title="a toy", claim="LN wins.", rows=ROWS, columns=COLUMNS)

FAST = {"steps": 6, "batch_tokens": 16, "valid_every": 3, "checkpoint_every": 2, "warmup": 2, "model.depth": 1}
DIGITS = {"pocket": Base("tiny", RECIPES["vit_digits"], FAST), "paper": Base("tiny", RECIPES["vit_digits"], FAST)}
ONE = Study(
    id="one",
    title="one column, trained in moments",
    rows=tuple(dataclasses.replace(row, printed=()) for row in ROWS),
    columns=(Column(title="accuracy", metric="accuracy", base=DIGITS),),
)


def board():
    return Board(Console(quiet=True), [], 1)


def put(cell, out, seed=0, **changed):
    """Write the result of a finished run without training."""
    folder, run = seeded(cell, out, seed)
    made = result(per=10.0 + seed)
    results.write(folder, {**made, "run": dataclasses.asdict(run), **changed})
    return folder


# -- grids ------------------------------------------------------------------------------------------------------------


def test_a_grid_is_rows_times_columns_that_have_a_recipe():
    cells = expand(TOY, "pocket")
    assert [(cell.row, cell.column) for cell in cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [cell.folder.name for cell in cells] == ["layer", "layer,bucketing=False", "un", "un,bucketing=False"]
    assert [cell.run.bucketing for cell in cells] == [True, False, True, False]
    assert {cell.run.steps for cell in cells} == {6}
    assert {cell.run.steps for cell in expand(TOY, "paper")} == {9}
    assert TOY.scales == ("pocket", "paper")
    assert expand(TOY, "gpu") == []
    assert {make(cell.run.model.norm, 8).warmup for cell in cells if cell.row == 2} == {2}, "with the learning rate"


def test_rows_are_chosen_by_norm_or_label():
    for name in ("un", "UN"):
        assert {cell.row for cell in expand(TOY, "pocket", [name])} == {2}
    longer = Row(label="un(warmup=9)", settings={"model.norm": "un(warmup=9)"})
    study = dataclasses.replace(TOY, rows=(*ROWS, longer))
    assert {cell.row for cell in expand(study, "pocket", ["un"])} == {2, 3}, "all rows with this norm"
    named = dataclasses.replace(TOY, rows=(ROWS[0], ROWS[1], dataclasses.replace(ROWS[2], label="un"), longer))
    assert {cell.row for cell in expand(named, "pocket", ["un"])} == {2}, "the row of this label alone"
    with pytest.raises(ValueError, match=r"row of toy named 'layr' \(did you mean 'layer'\?\)"):
        expand(TOY, "pocket", ["layr"])
    with pytest.raises(ValueError, match="no scale 'pockets'; there are pocket, gpu, paper"):
        expand(TOY, "pockets")


def test_settings_replace_and_multiply():
    run = RECIPES["g2p_cmudict"]()
    changed = override(run, {"warmup": Times(0.5), "lr": Times(2), "model.depth": 5, "batch_tokens": Times(1 / 8)})
    assert (changed.warmup, changed.lr, changed.model.depth) == (run.warmup // 2, run.lr * 2, 5)
    assert changed.batch_tokens == round(run.batch_tokens / 8)
    assert (
        dataclasses.replace(changed, **{f: getattr(run, f) for f in ("warmup", "lr", "model", "batch_tokens")}) == run
    )
    with pytest.raises(ValueError, match=r"no setting 'model\.norms'"):
        override(run, {"model.norms": "un"})
    assert warmed("un(warmup=7)", 100) == "un(warmup=7)"


def test_studies_share_the_runs_that_they_have_in_common():
    """A row that repeats its base's settings is the same run."""
    same = Study(id="b", title="", columns=COLUMNS[:1], rows=(Row(label="x", settings={"model.placement": "pre"}),))
    assert expand(same, "pocket")[0].folder == expand(TOY, "pocket")[0].folder
    twice = dataclasses.replace(TOY, columns=(COLUMNS[0], COLUMNS[0], COLUMNS[2]))
    assert len(unique(expand(twice, "pocket"))) == 2
    place = {"model.norm_at": {"decoder.*": "layer"}}
    both = Study(id="c", title="", columns=COLUMNS[:1], rows=(Row(label="x", settings=place),))
    assert expand(both, "pocket")[0].run.model.norm_at == {}


# -- the papers -------------------------------------------------------------------------------------------------------


def test_every_study_is_under_its_own_name():
    assert all(study.id == name for name, study in STUDIES.items())
    wanted = {f"pn.table{n}" for n in range(1, 5)} | {f"pn.figure{n}" for n in range(2, 8)}
    wanted |= {f"tears.table{n}" for n in range(2, 9)} | {f"tears.figure{n}" for n in range(1, 5)}
    wanted |= {f"un.table{n}" for n in range(1, 11)} | {f"un.figure{n}" for n in (1, 3, 4, 5, 6)}
    assert wanted == {name for name in STUDIES if name.split(".")[0] in ("pn", "tears", "un")}


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_of_a_table_has_its_printed_figures(name):
    study = STUDIES[name]
    assert len({row.label for row in study.rows}) == len(study.rows)
    if ".table" in name:
        for row in study.rows:
            assert len(row.printed) == len(study.columns), row.label
            for figure in row.printed:
                assert re.fullmatch(r"\d+(\.\d+)?[*†‡]*|FAIL|fails?|[/-]", figure), (row.label, figure)
    else:
        assert all(row.settings is not None and not row.printed for row in study.rows)
    assert bool(study.source) == bool(study.claim) == (name.split(".")[0] in ("pn", "tears", "un"))
    run = RECIPES["g2p_cmudict"]()
    for row in study.rows:  # whatever a row changes is a setting that there is, and its norm is one that there is
        for scale in SCALES:
            changed = override(override(run, row.settings or {}), row.at.get(scale, {}))
            assert make(changed.model.norm, 32)
    for column in study.columns:
        override(run, column.settings)


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_study_is_a_run(scale):
    """Recipes are there, settings fit each other, and runs of one folder are the same run."""
    runs = {}
    for study in STUDIES.values():
        given = [part.base or {} for part in (*study.columns, *study.rows)]
        each = [one for bases in given for one in (bases if isinstance(bases, tuple) else (bases,))]
        bases = [base for one in each for base in one.values()]
        assert {base.recipe for base in bases} <= set(RECIPES.values())
        for cell in expand(study, scale):
            assert runs.setdefault(cell.folder, cell.run) == cell.run, (study.id, cell.folder)
            assert cell.run.device == ("cpu" if scale == "pocket" else "cuda")
            assert cell.run.checkpoint_every > 0
    assert len(runs) > 20


def test_the_papers_settings_at_paper_scale():
    (pn,) = [
        cell.run for cell in expand(STUDIES["pn.table1"], "paper", ["Pre-Norm PN"]) if cell.run.data == "iwslt14.de-en"
    ]
    assert (pn.warmup, make(pn.model.norm, 8).warmup, pn.model.norm_at) == (8000, 8000, {"decoder.*": "layer"})
    assert (pn.lr, pn.steps, pn.average, pn.model.width, pn.model.depth) == (1.5e-3, 100_000, 10, 512, 6)
    (un,) = [cell.run for cell in expand(STUDIES["un.table1"], "paper", ["un"]) if cell.run.data == "iwslt14.de-en"]
    assert (un.warmup, un.lr, un.model.norm, un.model.norm_at) == (6000, 7e-4, "un(window=4, warmup=4000)", {})
    for cell, warmup in zip(
        expand(STUDIES["tears.table2"], "paper", ["SmallInit PreNorm"]), (4000, 8000, 16_000), strict=True
    ):
        assert cell.run.warmup == warmup
        assert cell.run.lr == pytest.approx((512 * warmup) ** -0.5), "Eq. 7 with lambda 1"
    synced = {cell.run.data: cell.run for cell in expand(STUDIES["pn.table1"], "paper", ["Pre-Norm BN"])}["wmt14.en-de"]
    assert (synced.model.norm, synced.accumulate * synced.devices) == ("batch(sync=True)", 128)
    for scale, schedule in (("pocket", "cosine"), ("gpu", "validation_decay"), ("paper", "validation_decay")):
        cells = expand(STUDIES["core.ted-gl"], scale)
        ends = [cell.run for cell in cells if STUDIES["core.ted-gl"].columns[cell.column].title.endswith("none")]
        assert {(run.warmup, run.schedule) for run in ends} == {(0, schedule)}
    assert {run.lr for run in ends} == {3e-4}
    fixed = expand(STUDIES["tears.table7"], "paper", ["ScaleNorm (g = √d) + FixNorm"])[0].run
    assert (fixed.model.norm_at, fixed.stop_lr) == ({"decoder.final_norm": "scale"}, 1e-6)
    (text,) = [cell.run for cell in expand(STUDIES["pn.table2"], "paper", ["power"]) if cell.run.data == "wikitext-103"]
    assert (text.model.depth, text.context, text.model.adaptive) == (6, 80, (20_000, 40_000, 200_000))
    for cell in expand(STUDIES["pn.figure5"], "paper"):
        assert cell.run.batch_tokens * cell.run.accumulate == pytest.approx(pn.batch_tokens, abs=4)


def test_well_known_figures_of_the_papers():
    """Against a slip while copying: sums over tables, counted by hand in the paper."""
    printed = {(name, row.label): row.printed for name, study in STUDIES.items() for row in study.rows if row.printed}
    assert printed["pn.table1", "Pre-Norm PN"] == ("35.9", "30.1")
    assert printed["pn.table2", "Tensor-Transformer 1core + PN"] == ("47.6", "17.9")
    assert printed["pn.table2", "Tensor-Transformer 1core + LN"] == ("53.2*", "20.9*")
    assert printed["pn.table4", "GN"] == ("35.7", "51.7")
    assert printed["tears.table3", "PreNorm + FixNorm + ScaleNorm"][0] == "20.91‡*"
    assert printed["un.table1", "UN, folds"] == ("35.4", "39.9")
    # Table 3 of Tears prints the average gain over its second row: +0.27, +0.61, +1.10
    rows = [[table.number(figure) for figure in row.printed] for row in STUDIES["tears.table3"].rows]
    gains = [sum(a - b for a, b in zip(row, rows[1], strict=True)) / 5 for row in rows]
    assert [round(gain, 2) for gain in gains] == [-4.05, 0.0, 0.27, 0.61, 1.1]
    # Tables 3 and 4 of UN print the loss against LN
    for name, places, losses in (
        ("un.table3", (0,), [(0.9,), (0.7,), (1.2,), (0.3,)]),
        ("un.table4", (0, 6), [(1.1, 0.8), (0.9, 0.6), (1.4, 0.9), (0.4, 0.2)]),
    ):
        rows = [[table.number(row.printed[place]) for place in places] for row in STUDIES[name].rows]
        printed = [tuple(round(a - b, 1) for a, b in zip(rows[0], row, strict=True)) for row in rows[1:]]
        assert printed == losses


def test_papers_studies_name_columns_that_are_measured():
    assert {column.metric for study in STUDIES.values() for column in study.columns} <= set(STUDY_METRICS)
    with pytest.raises(ValueError, match="no metric named 'bleus'"):
        Study(id="x", title="", rows=(), columns=(Column(title="", metric="bleus"),))
    with pytest.raises(ValueError, match="1 figures for 2 columns"):
        Study(id="x", title="", rows=(Row(label="a", settings={}, printed=("1",)),), columns=COLUMNS[:2])


def test_un_filters_outliers_in_image_studies():
    """Without, the paper's runs on pictures fail (Table 7)."""
    pictures = 0
    for study in (study for name, study in STUDIES.items() if name.startswith("un.")):
        for cell in expand(study, "paper"):
            name, given = parse(cell.run.model.norm)
            if name == "un" and cell.run.task in ("images", "detection"):
                pictures += 1
                left_out = study.rows[cell.row].label == "without"
                assert bool(given.get("outlier_filtration")) != left_out, (study.id, cell.folder)
    assert pictures > 20


# -- tables -----------------------------------------------------------------------------------------------------------


def test_our_figures_appear_beside_the_papers(tmp_path):
    ln, _, un, _ = expand(TOY, "pocket")
    for seed in range(3):
        put(ln, tmp_path, seed, command="normkit study toy --seeds 3 --only LN")
    put(un, tmp_path, 0, status="diverged at step 4", scores={}, command="normkit study toy")
    made = table.collect(TOY, "pocket", tmp_path)
    cell = made["rows"][1]["cells"][0]
    values = [10.0 - 0.4 + seed for seed in range(3)]
    assert [run["value"] for run in cell["runs"]] == pytest.approx(values)
    assert (cell["n"], cell["mean"], cell["spread"]) == (3, pytest.approx(10.6), pytest.approx(1.0))
    assert made["rows"][2]["cells"][0]["runs"][0]["status"] == "diverged at step 4"
    text = table.text(made)
    line = {row.split("  ")[0]: row for row in text.splitlines()}
    assert "10.0" in line["LN"]
    assert "10.6 ± 1.0 (3)" in line["LN"]
    assert "81.3" in line["LN"]
    assert "diverged at step 4" in line["UN"], "a failure is a row"
    assert line["theirs"].split() == ["theirs", "9.0", "-", "/", "80.0"]
    assert "ours, pocket" in text
    assert "pictures" in text
    assert "Not yet run at scale pocket: PER, shuffled, pictures." in text
    assert "PER: of 1 pairs, ours order 1 as the paper, 0 against." in text
    assert "a processor" in text
    assert "012345678" in text
    assert "Commands: normkit study toy --seeds 3 --only LN; normkit study toy\n" in text
    assert "Command" not in table.markdown(made, commands=False)
    table.write(made, tmp_path)
    folder = tmp_path / "pocket" / "tables"
    assert (folder / "toy.txt").read_text(encoding="utf8") == text
    assert json.loads((folder / "toy.json").read_text(encoding="utf8")) == made
    assert "| LN | 10.0 | 10.6 ± 1.0 (3) | 10.5 | 81.3 |" in (folder / "toy.md").read_text(encoding="utf8")


def test_scales_are_never_mixed(tmp_path):
    """Table and plan refuse a run of another scale in this scale's folder."""
    pocket, paper = expand(TOY, "pocket")[0], expand(TOY, "paper")[0]
    assert pocket.folder != paper.folder
    folder = put(pocket, tmp_path)
    there = results.read(folder)
    results.write(folder, {**there, "run": {**there["run"], "workers": 2}})  # changes no result
    assert table.collect(TOY, "pocket", tmp_path)
    results.write(folder, {**there, "run": dataclasses.asdict(seeded(paper, tmp_path, 0)[1])})
    for use in (table.collect, runner.plan):
        with pytest.raises(ValueError, match=r"other settings.*steps 9 where the study has 6.*--out"):
            use(TOY, "pocket", tmp_path)
    # nor do both scales' runs, each in its place, meet in a table
    put(pocket, tmp_path)
    put(paper, tmp_path, seed=1)
    seeds = {s: table.collect(TOY, s, tmp_path)["rows"][1]["cells"][0]["runs"][0]["seed"] for s in ("pocket", "paper")}
    assert seeds == {"pocket": 0, "paper": 1}


def test_the_order_of_rows_is_compared_with_the_papers(tmp_path):
    """`per` is better if lower: ours reverse the paper's order; a divergence is worst."""
    rows = (*ROWS, Row(label="BN", settings={"model.norm": "batch"}, printed=("FAIL", "FAIL", "/")))
    study = dataclasses.replace(TOY, rows=rows)
    for cell, seed in zip(expand(study, "pocket")[::2], (5, 0, 0), strict=True):
        folder = put(cell, tmp_path, seed)
        if cell.row == 3:
            results.write(folder, {**results.read(folder), "status": "diverged at step 3", "scores": {}})
    printed = table.agreement(table.collect(study, "pocket", tmp_path), 0)
    assert printed == "PER: of 3 pairs, ours order 2 as the paper, 1 against: UN over LN."
    assert math.isinf(table.number("FAIL"))


def test_statistics_are_read_off_recorded_rows(tmp_path):
    rows = [f"{step},a,batch,distance_mean,{value}" for step, value in ((1, 99), (50, 1), (60, 3), (100, 2))]
    rows += ["70,b,batch,distance_mean,500", "70,a,batch,distance_var,500"]
    (tmp_path / "rows.csv").write_text("\n".join(["step,site,norm,quantity,value", *rows]) + "\n", encoding="utf8")
    run = {"run": {"steps": 5000}, "curve": [{"step": 100}]}  # stopped early
    read = {name: STUDY_METRICS[name].read(tmp_path, run) for name in STUDY_METRICS if "distance_mean" in name}
    assert read.pop("distance_mean anywhere") == 500.0
    assert read == {"distance_mean": 2.0, "distance_mean max": 3.0, "distance_mean outliers": 1.5}
    values = [f"100,target_embedding.words,,singular_value[{i}],{1 / (1 + i)}" for i in range(0, 100, 3)]
    (tmp_path / "rows.csv").write_text("\n".join(["step,site,norm,quantity,value", *values]) + "\n", encoding="utf8")
    assert STUDY_METRICS["singular value"].read(tmp_path, run) == pytest.approx(1 / 10)
    assert STUDY_METRICS["distance_mean"].read(tmp_path / "nowhere", run) is None


# -- running ----------------------------------------------------------------------------------------------------------


def run_study(study, out, engine=None, **more):
    plan = runner.plan(study, "pocket", out, **more)
    with engine or Workers(1, lambda *_: None) as workers:
        return plan, *runner.run_study(study, "pocket", out, plan, workers, board(), "normkit study toy")


class Here:
    """An engine that runs jobs in this process, and fails for given titles."""

    def __init__(self, failing=()):
        self.failing, self.jobs, self.done = failing, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, title, job, *arguments):
        self.jobs.append((title, job, arguments))

    def ended(self):
        while self.jobs:
            title, job, arguments = self.jobs.pop(0)
            self.done.append(title)
            if any(part in title for part in self.failing):
                yield title, RuntimeError("out of memory")
            else:
                yield title, job(title, *arguments)

    def stop(self):
        self.jobs.clear()


def test_a_study_runs_fails_resumes_and_ends(tmp_path):
    """A failed run is a row and is tried again; a finished run is kept."""
    wild = Row(label="wild", settings={"lr": 1e30, "clip": 0.0, "warmup": 0})
    study = dataclasses.replace(ONE, rows=(*ONE.rows, wild))
    first = Here(failing=["/un/"])
    plan, made, interrupted = run_study(study, tmp_path, first)
    assert len(plan.todo) == 3
    assert not interrupted
    ended = {row["label"]: [run["status"] for run in row["cells"][0]["runs"]] for row in made["rows"]}
    assert ended["theirs"] == []
    assert ended["LN"] == ["done"]
    assert ended["UN"] == ["failed: out of memory"]
    assert ended["wild"][0].startswith("diverged at step ")
    assert made["rows"][1]["cells"][0]["mean"] > 0
    again = Here()
    plan, made, _ = run_study(study, tmp_path, again)
    assert (list(map(str, again.done)), plan.finished) == (["pocket/tiny/un/seed-0"], 2), "a divergence is a result"
    assert made["rows"][2]["cells"][0]["runs"][0]["status"] == "done"
    assert runner.plan(study, "pocket", tmp_path).todo == {}
    assert [run.seed for run in runner.plan(study, "pocket", tmp_path, seeds=2).todo.values()] == [1, 1, 1]


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    from normkit_papers.train.run import train

    study = dataclasses.replace(ONE, rows=ONE.rows[2:])
    ((folder, run),) = runner.plan(study, "pocket", tmp_path).todo.items()
    assert train(run, folder, on_progress=lambda tick: tick.step == 4)["status"] == "interrupted at step 4"
    interrupted = Here()
    assert list(runner.plan(study, "pocket", tmp_path).todo) == [folder]
    run_study(study, tmp_path, interrupted)
    straight = train(run, tmp_path / "straight")
    kept = results.read(folder)
    assert kept["curve"] == straight["curve"]
    assert kept["scores"] == straight["scores"]


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    class Impatient(Here):
        def ended(self):
            for number, outcome in enumerate(super().ended()):
                yield outcome
                if number == 0 and self.jobs:
                    raise KeyboardInterrupt

    _, made, interrupted = run_study(ONE, tmp_path, Impatient())
    assert interrupted
    assert [len(row["cells"][0]["runs"]) for row in made["rows"]] == [0, 1, 0]


@pytest.mark.slow
def test_runs_in_a_process_of_their_own(tmp_path):
    """One that another process trains is left to that."""
    folder = next(iter(runner.plan(ONE, "pocket", tmp_path).todo))
    with locked(folder):
        _, made, _ = run_study(ONE, tmp_path, only=["LN"])
    assert made["rows"][1]["cells"][0]["runs"] == []
    assert not folder.exists()
    printed = []
    _, made, _ = run_study(ONE, tmp_path, Workers(1, lambda title, tick: printed.append((title, tick.stage))))
    assert [row["cells"][0]["n"] for row in made["rows"]] == [0, 1, 1]
    assert {title for title, _ in printed} == {"pocket/tiny/layer/seed-0", "pocket/tiny/un/seed-0"}
