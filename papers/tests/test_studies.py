"""Studies: grids of runs, printed figures, CSV, tables, verdicts. Runs may fail or be killed."""

import dataclasses
import os
import re

import made_results
import pytest
from joblib.externals.loky import reusable_executor
from normkit_papers import results
from normkit_papers.metrics import STUDY_METRICS, validation_metrics
from normkit_papers.recipes import RECIPES
from normkit_papers.report import verdicts
from normkit_papers.report.verdicts import AGREES, DISAGREES, INCOMPLETE, UNDECIDED
from normkit_papers.studies import rows, runner, similarity, table
from normkit_papers.studies.catalogue import OF_PAPERS, STUDIES
from normkit_papers.study import SCALES, Base, Column, Study, TableRow, Times, expand, override, seeded, seeds, warmed
from normkit_papers.train.folder import locked
from normkit_papers.train.run import train
from rich.console import Console

from normkit.norms import make
from normkit.watch import Recording
from normkit.watch import Row as RecordedRow
from normkit.watch.quantities import QUANTITIES, choose

TINY = {"steps": 6, "batch_tokens": 120, "test_items": 8, "valid_every": 3, "checkpoint_every": 2, "warmup": 2}
BASE = {
    "pocket": Base("tiny", RECIPES["g2p_cmudict"], TINY),
    "paper": Base("tiny", RECIPES["g2p_cmudict"], {**TINY, "steps": 9}),
}
COLUMNS = (
    Column("PER", "per", BASE),
    Column(title="PER, shuffled", metric="per running", base=BASE, settings={"bucketing": False}),
    Column("pictures", "accuracy"),
)
ROWS = (
    TableRow(label="theirs", settings=None, printed=("9.0", "/", "80.0")),
    TableRow(label="LN", settings={}, printed=("10.0", "10.5", "81.3")),
    TableRow(label="UN", settings={"model.norm": "un"}, printed=("11.0*", "FAIL", "81.0")),
)
TOY = Study(id="toy", title="a toy", claim="LN wins.", rows=ROWS, columns=COLUMNS)

FAST = {"steps": 6, "batch_tokens": 16, "valid_every": 3, "checkpoint_every": 2, "warmup": 2, "model.depth": 1}
DIGITS = {"pocket": Base("tiny", RECIPES["vit_digits"], FAST)}
ONE = Study(
    id="one",
    title="one column, trained in moments",
    rows=(
        TableRow("LN", {}),
        TableRow("UN", {"model.norm": "un"}),
        TableRow("wild", {"lr": 1e30, "clip": 0.0, "warmup": 0}),
    ),
    columns=(Column("accuracy", "accuracy", DIGITS),),
)
QUIET = Console(quiet=True)


def put(cell, out, seed=0, **changed):
    """Write the result of a finished run without training."""
    folder, run = seeded(cell, out, seed)
    results.write(folder, {**made_results.result(per=10.0 + seed), "run": dataclasses.asdict(run), **changed})
    return folder


def built(study, out, scale="pocket"):
    return table.build(study, scale, rows.collect(study, scale, out))


# -- grids ------------------------------------------------------------------------------------------------------------


def test_a_grid_is_rows_times_columns_that_have_a_recipe():
    cells = expand(TOY, "pocket")
    assert [(cell.row, cell.column) for cell in cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [cell.folder.name for cell in cells] == ["layer", "layer,bucketing=False", "un", "un,bucketing=False"]
    assert [cell.run.bucketing for cell in cells] == [True, False, True, False]
    assert {cell.run.steps for cell in expand(TOY, "paper")} == {9}
    assert (TOY.scales, expand(TOY, "gpu")) == (("pocket", "paper"), [])
    assert {make(cell.run.model.norm, 8).warmup for cell in cells if cell.row == 2} == {2}, "with the learning rate"


def test_rows_are_chosen_by_norm_or_label():
    for name in ("un", "UN"):
        assert {cell.row for cell in expand(TOY, "pocket", [name])} == {2}
    longer = TableRow(label="un(warmup=9)", settings={"model.norm": "un(warmup=9)"})
    study = dataclasses.replace(TOY, rows=(*ROWS, longer))
    assert {cell.row for cell in expand(study, "pocket", ["un"])} == {2, 3}, "all rows with this norm"
    with pytest.raises(ValueError, match="'layr'"):
        expand(TOY, "pocket", ["layr"])
    with pytest.raises(ValueError, match="'pockets'"):
        expand(TOY, "pockets")


def test_settings_replace_and_multiply():
    run = RECIPES["g2p_cmudict"]()
    changed = override(run, {"warmup": Times(0.5), "lr": Times(2), "model.depth": 5, "batch_tokens": Times(1 / 8)})
    assert (changed.warmup, changed.lr, changed.model.depth) == (run.warmup // 2, run.lr * 2, 5)
    assert changed.batch_tokens == round(run.batch_tokens / 8)
    with pytest.raises(ValueError, match=r"model\.norms"):
        override(run, {"model.norms": "un"})
    assert warmed("un(warmup=7)", 100) == "un(warmup=7)"


# -- the studies of the papers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_has_its_printed_figures_and_settings_that_exist(name):
    study = STUDIES[name]
    assert study.id == name
    assert len({row.label for row in study.rows}) == len(study.rows)
    for row in study.rows:
        if ".table" in name:
            assert len(row.printed) == len(study.columns), row.label
            for figure in row.printed:
                assert re.fullmatch(r"\d+(\.\d+)?[*†‡]*|FAIL|fails?|[/-]", figure), (row.label, figure)
        else:
            assert row.settings is not None
            assert not row.printed
    assert bool(study.source) == bool(study.claim) == (name in OF_PAPERS)


def test_all_36_tables_and_figures_are_here_with_a_pocket_scale_and_a_rule():
    assert len(OF_PAPERS) == 36
    assert all("pocket" in STUDIES[name].scales or STUDIES[name].script for name in OF_PAPERS)
    for name in OF_PAPERS:
        study = STUDIES[name]
        labels, titles = {row.label for row in study.rows}, {column.title for column in study.columns}
        assert study.rules
        for rule in study.rules:
            assert set(rule.columns) <= titles, (name, rule)
            for place in filter(None, (rule.row, rule.than)):
                label, _, title = place.partition(" @ ")
                assert label in labels, (name, label)
                assert not title or title in titles, (name, title)


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_study_is_a_run(scale):
    """Settings fit each other, and runs of one folder are the same run."""
    runs = {}
    for study in STUDIES.values():
        for cell in expand(study, scale):
            assert runs.setdefault(cell.folder, cell.run) == cell.run, (study.id, cell.folder)
            assert cell.run.device == ("cpu" if scale == "pocket" else "cuda")
            assert cell.run.checkpoint_every > 0
    assert len(runs) > 20


def test_well_known_figures_of_the_papers():
    """Against a slip while copying: sums over tables, counted by hand in the paper."""
    printed = {(name, row.label): row.printed for name, study in STUDIES.items() for row in study.rows if row.printed}
    assert printed["pn.table1", "Pre-Norm PN"] == ("35.9", "30.1")
    assert printed["pn.table2", "Tensor-Transformer 1core + PN"] == ("47.6", "17.9")
    assert printed["un.table1", "UN, folds"] == ("35.4", "39.9")
    # Table 3 of Tears prints the average gain over its second row: +0.27, +0.61, +1.10
    lines = [[float(figure.strip("*†‡")) for figure in row.printed] for row in STUDIES["tears.table3"].rows]
    gains = [sum(a - b for a, b in zip(line, lines[1], strict=True)) / 5 for line in lines]
    assert [round(gain, 2) for gain in gains] == [-4.05, 0.0, 0.27, 0.61, 1.1]
    # Tables 3 and 4 of UN print the loss against LN
    for name, places, losses in (
        ("un.table3", (0,), [(0.9,), (0.7,), (1.2,), (0.3,)]),
        ("un.table4", (0, 6), [(1.1, 0.8), (0.9, 0.6), (1.4, 0.9), (0.4, 0.2)]),
    ):
        lines = [[float(row.printed[place]) for place in places] for row in STUDIES[name].rows]
        assert [tuple(round(a - b, 1) for a, b in zip(lines[0], line, strict=True)) for line in lines[1:]] == losses


# -- CSV and tables ---------------------------------------------------------------------------------------------------


def test_our_figures_appear_beside_the_papers(tmp_path):
    first, second, third, _ = expand(TOY, "pocket")
    for seed in (0, 1, 10):
        put(first, tmp_path, seed)
    (tmp_path / first.folder / "seed-0-old").mkdir()
    assert sorted(seeds(tmp_path / first.folder)) == [0, 1, 10]
    put(second, tmp_path, status="diverged at step 7", scores={})
    folder, _ = seeded(third, tmp_path, 0)
    folder.mkdir(parents=True)
    (folder / rows.FAILURE).write_text("failed: no memory\n")
    grid = table.grid(built(TOY, tmp_path))
    assert grid[0] == ["", "PER", "PER", "PER, shuffled", "PER, shuffled", "pictures"]
    assert grid[2] == ["theirs", "9.0", "-", "/", "-", "80.0"]
    assert grid[3] == ["LN", "10.0", "13.3 ± 5.5 (3)", "10.5", "diverged at step 7", "81.3"]
    assert grid[4] == ["UN", "11.0*", "failed", "FAIL", "not yet run (2 min)", "81.0"]
    assert "failed: no memory" in table.text(built(TOY, tmp_path))


def test_a_row_of_a_csv_replaces_that_of_the_same_run(tmp_path):
    path, first = tmp_path / "toy.csv", expand(TOY, "pocket")[0]
    put(first, tmp_path)
    before = rows.append(path, rows.collect(TOY, "pocket", tmp_path))
    assert [(row["row"], row["column"], row["per beam"], row["minutes"]) for row in before] == [
        ("LN", "PER", "9.6", "2")
    ]
    put(first, tmp_path, scores={"running": made_results.score(7.0)})
    put(first, tmp_path, seed=1)
    rows.append(path, rows.collect(TOY, "pocket", tmp_path))
    after = rows.read(path)
    assert [(row["seed"], row["per running"]) for row in after] == [("0", "7"), ("1", "11")]
    assert [STUDY_METRICS["per"].value(row) for row in after] == [7.0, 10.6], "of beam search where there is one"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"toy\.csv"):
        rows.read(path)


def test_kept_results_are_of_rows_that_studies_have():
    for path in sorted(rows.KEPT.glob("*.csv")):
        if path.stem in STUDIES:
            labels = {row.label for row in STUDIES[path.stem].rows}
            kept = {row["row"] for row in rows.read(path)}
            assert kept & labels or not kept, path


def test_losses_give_metrics_also_of_a_run_that_ended_early():
    made = made_results.result(steps=1000)
    made["curve"] = [{"step": step, "train_loss": 2.0 if step > 95 else 9.0} for step in range(1, 101)]
    made["valid"] = [{"step": 50, "loss": 1e9, "bleu": 3.0}, {"step": 100, "loss": 0.0, "bleu": 2.0}]
    found = validation_metrics(made)
    assert found["perplexity train"] == pytest.approx(7.389, abs=1e-3)
    assert (found["bleu valid"], found["perplexity valid"]) == (3.0, 1.0)


def test_recorded_rows_are_summarized_over_the_run_by_depth_and_by_time():
    places = ("encoder.layers.0.self_norm", *(f"decoder.layers.{i}.{place}_norm" for i in range(4)
              for place in ("self", "cross", "feedforward")), "decoder.final_norm")  # fmt: skip
    g = {site: float(place) for place, site in enumerate(places)}
    recording = Recording(
        [RecordedRow(9, site, "un", "learned_g", value) for site, value in g.items()]
        + [RecordedRow(step, site, "un", "filtered", step * g[site]) for step in (20, 50, 100) for site in places[:4]]
        + [
            RecordedRow(step, places[0], "un", "distance_mean", value)
            for step, value in ((9, 7.0), (20, 1.0), (99, 3.0))
        ]
    )
    expected = {
        "g shallow": (1 + 3 + 4 + 6) / 4, "g deep": (7 + 9 + 10 + 12) / 4, "g output": 13.0,
        "filtered shallow": 50.0, "filtered deep": 250.0, "filtered early": 75.0, "filtered late": 75.0,
        "distance_mean": 2.0, "distance_mean outliers": 1.5, "g_mu": None,
    }  # fmt: skip
    assert {name: STUDY_METRICS[name].summary(recording, 100) for name in expected} == expected


# -- verdicts ---------------------------------------------------------------------------------------------------------


def judged(name, scores):
    """Verdict on a study of the papers, from BLEU by row and column."""
    made = [
        {"study": name, "scale": "pocket", "row": row, "column": column, "seed": str(seed), "status": "done",
         "bleu beam": str(value), "data": "d", "items": "", "steps": "5", "parameters": "7", "minutes": "1"}
        for (row, column), values in scores.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    return verdicts.judge(table.build(STUDIES[name], "pocket", made))


@pytest.mark.parametrize(
    ("un_without_mean", "without_momentum", "verdict"),
    [
        ((28.0, 28.1, 27.9), (9.0, 9.1, 9.2), AGREES),
        ((30.0, 30.2, 30.1), (9.0, 9.1, 9.2), UNDECIDED),
        ((31.0, 31.1, 30.9), (9.0, 9.1, 9.2), DISAGREES),
        ((28.0, 28.1, 27.9), (29.0, 29.1, 29.2), DISAGREES),
        ((28.0,), (9.0,), UNDECIDED),
    ],
)
def test_the_interval_of_a_difference_decides_a_verdict(un_without_mean, without_momentum, verdict):
    scores = {
        ("1: GM, AM, alpha", "IWSLT14"): (30.0, 30.1, 30.2),
        ("2: AM, alpha", "IWSLT14"): un_without_mean,
        ("4: GM, AM", "IWSLT14"): without_momentum,
        ("5: GM", "IWSLT14"): (1.0, 1.0, 1.0),
    }
    assert judged("un.table9", scores)[0] == verdict
    assert judged("un.table9", {})[0] == "not run"


@pytest.mark.parametrize(("ours", "verdict"), [(12.0, DISAGREES), (11.7, UNDECIDED)])
def test_models_that_have_learned_too_little_allow_no_verdict(ours, verdict):
    """The paper's best score is 35.4; a rule on measured numbers, not on scores, is judged at any size."""
    labels = ("1: GM, AM, alpha", "2: AM, alpha", "4: GM, AM", "5: GM")
    assert judged("un.table9", {(label, "IWSLT14"): [ours] * 3 for label in labels})[0] == verdict
    speeds = {("LN", "ImageNet TPUT"): [6.0] * 2, ("UN", "ImageNet TPUT"): [5.0] * 2}
    made = [
        {"row": row, "column": column, "status": "done", "speed": str(speed)}
        for (row, column), values in speeds.items() for speed in values
    ]  # fmt: skip
    found = table.build(STUDIES["un.table8"], "pocket", made)
    rule = found.study.rules[0]._replace(columns=("ImageNet TPUT",))
    assert verdicts._apply(rule, found)[0] == DISAGREES


@pytest.mark.parametrize("missing", [("UN, folds", "IWSLT14"), ("NoNorm", "IWSLT14")])
def test_a_study_whose_rows_have_not_all_run_is_incomplete(missing):
    scores = {
        ("LN", "IWSLT14"): (30.0, 30.1, 30.2), ("UN, folds", "IWSLT14"): (30.0, 30.1, 30.2),
        ("BN, folds", "IWSLT14"): (20.0, 20.1, 20.2), ("MABN, folds", "IWSLT14"): (20.0, 20.1, 20.2),
        ("PN*, folds", "IWSLT14"): (20.0, 20.1, 20.2), ("NoNorm", "IWSLT14"): (1.0, 1.0, 1.0),
    }  # fmt: skip
    assert judged("un.table1", scores)[0] == AGREES
    del scores[missing]
    assert judged("un.table1", scores)[0] == INCOMPLETE
    scores["BN, folds", "IWSLT14"] = (40.0, 40.1, 40.2)
    assert judged("un.table1", scores)[0] == (DISAGREES if missing[0] == "NoNorm" else INCOMPLETE)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.id)
def test_runs_record_the_quantities_that_their_columns_show(study):
    for scale in study.scales:
        for cell in expand(study, scale):
            shown = study.columns[cell.column].metric.split()[0]
            assert shown not in QUANTITIES or (cell.run.record_every and shown in choose(cell.run.quantities)), cell


def test_columns_without_data_at_a_scale_leave_the_others_a_verdict():
    means = {"Pre-Norm PN": 36.0, "Pre-Norm LN": 35.0, "Pre-Norm PN-V": 34.0, "Pre-Norm BN": 30.0}
    scores = {(row, "IWSLT14 small"): (mean, mean + 0.1, mean + 0.2) for row, mean in means.items()}
    verdict, lines = judged("pn.table1", scores)
    assert verdict == UNDECIDED
    assert [AGREES in line for line in lines] == [True, False, True]  # the second is on WMT14


# -- running ----------------------------------------------------------------------------------------------------------


def test_a_study_runs_diverges_fails_and_goes_on(tmp_path, monkeypatch):
    plan = runner.plan([ONE], "pocket", tmp_path, seeds=1)
    assert len(plan.todo) == 3
    held = next(folder for folder in plan.todo if folder.parent.name == "un")
    with locked(held):
        status = runner.run_studies([ONE], "pocket", tmp_path, plan, "papers study one", console=QUIET)
    assert {folder.parent.name: each.split()[0] for folder, each in status.items()} == {
        "layer": "done", "un": "left", "layer,lr=1e-30,clip=0.0,warmup=0": "diverged",
    }  # fmt: skip
    found = rows.read(tmp_path / "one.csv")
    assert [row["row"] for row in found] == ["LN", "wild"]
    assert found[0]["command"] == "papers study one"
    again = runner.plan([ONE], "pocket", tmp_path, seeds=1)
    assert (list(again.todo), again.finished) == ([held], 2)
    monkeypatch.setattr(runner, "_train", lambda *_: 1 / 0)
    assert runner.run_studies([ONE], "pocket", tmp_path, again, "", console=QUIET)[held].startswith("failed: ")
    monkeypatch.undo()
    assert runner.run_studies([ONE], "pocket", tmp_path, again, "", console=QUIET) == {held: "done"}
    assert {row["row"]: row["status"].split()[0] for row in rows.read(tmp_path / "one.csv")} == {
        "LN": "done", "wild": "diverged", "UN": "done",
    }  # fmt: skip
    longer = {"pocket": Base("tiny", RECIPES["vit_digits"], {**FAST, "steps": 5})}
    other = dataclasses.replace(ONE, columns=(dataclasses.replace(ONE.columns[0], base=longer),))
    with pytest.raises(ValueError, match="steps"):
        runner.plan([other], "pocket", tmp_path, seeds=1)


@pytest.mark.slow
def test_a_study_goes_on_to_the_same_weights_after_a_worker_was_killed(tmp_path, monkeypatch):
    """As when memory runs out: SIGKILL from outside, while two runs train."""
    killed = []
    follow = runner.Display.follow

    def kill(display):
        if not killed and (workers := reusable_executor._executor) and list(display.notes.iterdir()):
            killed.append(next(iter(workers._processes)))
            os.kill(killed[0], 9)
        follow(display)

    monkeypatch.setattr(runner.Display, "follow", kill)
    slow = {"pocket": Base("slow", RECIPES["vit_digits"], {**FAST, "steps": 150, "valid_every": 0})}
    study = dataclasses.replace(ONE, rows=ONE.rows[:2], columns=(dataclasses.replace(ONE.columns[0], base=slow),))
    plan = runner.plan([study], "pocket", tmp_path, seeds=1)
    with pytest.raises(ValueError, match="--processes"):
        runner.run_studies([study], "pocket", tmp_path, plan, "", processes=2, console=QUIET)
    again = runner.plan([study], "pocket", tmp_path, seeds=1)
    status = runner.run_studies([study], "pocket", tmp_path, again, "", processes=2, console=QUIET)
    assert set(status.values()) == {"done"}
    for folder, run in list(plan.todo.items())[:1]:  # one of both: the pool ends with the worker
        train(run, tmp_path / "alone")
        assert (tmp_path / "alone/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_similarity_is_measured_once_against_the_first_row(tmp_path, monkeypatch):
    study = dataclasses.replace(ONE, rows=ONE.rows[:2], columns=(Column("CKA", "cka", DIGITS),))
    for cell in expand(study, "pocket"):
        made_results.write(put(cell, tmp_path), {**made_results.result(), "run": dataclasses.asdict(cell.run)})

    class Similar:
        run, model = expand(study, "pocket")[0].run, None

        def test_images(self, *_):
            return []

        def rows(self, step):
            return [RecordedRow(step, "a|a", "", "cka", 0.75)]

    monkeypatch.setattr(similarity, "load", lambda folder: Similar())
    monkeypatch.setattr(similarity, "open_task", lambda loaded: loaded)
    calls = []
    monkeypatch.setattr(similarity, "cka", lambda *_: calls.append(1) or Similar())
    similarity.add_similarity(study, "pocket", tmp_path)
    similarity.add_similarity(study, "pocket", tmp_path)
    assert len(calls) == 2
    assert [row["cka"] for row in rows.collect(study, "pocket", tmp_path)] == [0.75, 0.75]
