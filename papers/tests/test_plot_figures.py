"""Every figure of the papers from invented rows: small files, clear errors."""

import csv
import math
import random
import re
from pathlib import Path

import made_results
import pytest
from made_results import result
from normkit_papers import figures
from normkit_papers.report import curves, plot, results, speed, study_tables
from normkit_papers.report.recorded import Recorded, first_sites, recorded
from normkit_papers.unified.figures import folds_away

from normkit.watch import Recording, Row, read_run

QUANTITIES = sorted({name for row in figures.FIGURES.values() for name in row.needs.split()} - {"a", "score", "cka"})
SMOOTHING = {"un(window=4), label_smoothing=0.0", "un(window=4), label_smoothing=0.1"}
EVIL = "<script>alert(1)</script> $\\bad{$"


def run(folder, norm, sites=made_results.SITES, samples=40, **settings):
    """A run of 400 steps with all that figures need; its folder and result."""
    made = result(norm, 10 + len(norm), steps=400, **settings)
    chance = random.Random(norm)
    folder.mkdir(parents=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for step in range(1, 400, 400 // samples):
            writer.writerow((step, "", "", "gradient_norm", math.exp(chance.gauss(0, 1))))
            for site in sites:
                for quantity in QUANTITIES:
                    if quantity not in ("gradient_norm", "singular_value[i]"):
                        writer.writerow((step, site, norm, quantity, f"{100 * chance.random():.4g}"))
        for i in range(20):
            writer.writerow((400, "embedding", "", f"singular_value[{i}]", 5 / (i + 1)))
        for a in "abc":
            for b in "abc":
                writer.writerow((400, f"{a}|{b}", "", "cka", 1.0 if a == b else 0.5))
    results.write(folder, made)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    run(place / "batch", "batch")
    run(place / "pnv", "pnv", batch_tokens=1000)
    run(place / "smooth", "un(window=4)", label_smoothing=0.0)
    run(place / "un", "un(window=4)", label_smoothing=0.1)
    run(place / "more", "pnv", batch_tokens=2000)
    run(place / "digits", "batch", task="digits", data="digits")
    return results.find([place])


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_small_and_has_dark_colours(runs, tmp_path, name):
    text = figures.draw(name, runs, tmp_path / "a.svg")[0].read_text()
    assert len(text) < 400_000  # six runs
    assert "prefers-color-scheme:dark" in text
    assert "#e7e7e5" in text  # letters
    assert "<text" in text
    assert not re.search(r"[ML] ?-?\d+\.\d{3}", text)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("pn.figure2", {"pnv, batch_tokens=1000", "pnv, batch_tokens=2000", *SMOOTHING}),  # no BatchNorm
        ("pn.figure4", SMOOTHING),
        ("pn.figure5", {"digits: batch"}),
        ("un.figure5", set()),
    ],
)
def test_runs_that_are_not_drawn_are_returned(runs, tmp_path, name, left_out):
    _, found = figures.draw(name, runs, tmp_path / "a.svg")
    assert {label.removeprefix("cmudict: ") for label in found} == left_out


def test_scores_of_other_data_are_not_averaged(tmp_path):
    for size, data in ((100, "a"), (200, "a"), (200, "b")):
        run(tmp_path / f"{data}{size}", "pnv", batch_tokens=size, data=data, samples=1)
    for made in (found := results.find([tmp_path])).values():
        made["scores"]["running"] = {"per": made["run"]["batch_tokens"] / (10 if made["run"]["data"] == "a" else 1)}
    figure, used = figures.FIGURES["pn.figure5"].draw(recorded(found))
    assert list(figure.axes[0].lines[0].get_ydata()) == [10, 20]
    assert {one.settings["data"] for one in used} == {"a"}


def test_missing_quantities_are_named(tmp_path):
    made = {tmp_path: result()}
    for name, row in figures.FIGURES.items():
        if row.needs != "a score":
            with pytest.raises(ValueError, match=name) as caught:
                figures.draw(name, made, tmp_path / "a.svg")
            assert row.needs.split()[0].split("[")[0] in str(caught.value)
            assert "record" in str(caught.value)
    with pytest.raises(ValueError, match="two sizes of batch"):
        figures.draw("pn.figure5", made, tmp_path / "a.svg")
    with pytest.raises(ValueError, match=r"there is no figure named 'pn\.figure1'"):
        figures.draw("pn.figure1", made, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_the_first_batch_norm_is_shown(tmp_path):
    """Not the LayerNorm before it, whose rows predict batch statistics there."""
    folder = run(tmp_path / "a", "batch", sites=["first", "second"])
    text = (folder / "rows.csv").read_text()
    text = re.sub(r"(?m)^(\d+),first,batch,distance_(\w+),.*", r"\1,first,layer,distance_\2,1e6", text)
    (folder / "rows.csv").write_text(re.sub(r"(?m)^(\d+,first),batch,", r"\1,layer,", text))
    ((one, site),) = first_sites(recorded(results.find([folder])), "distance_mean", "batch")
    assert (one.recording.sites["first"], site) == ("layer", "second")


def test_gradients_are_shown_in_the_order_of_the_model(tmp_path):
    """Backward passes record the last norm first."""
    text = "".join(f"1,{site},batch,rms,1\n" for site in "abc") + "".join(f"1,{site},batch,g_mu,1\n" for site in "cba")
    (tmp_path / "rows.csv").write_text(f"step,site,norm,quantity,value\n{text}")
    assert list(read_run(tmp_path).of("g_mu")) == ["a", "b", "c"]


def test_the_numbers_of_the_page_are_those_of_the_file():
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "pictures" / "numbers.txt").read_text().strip("\n") in (docs / "figures.md").read_text()


def test_no_panel_is_left_empty(runs):
    made = figures.FIGURES["tears.figure2"].draw(recorded(runs)[:3])[0]
    assert [bool(axes.lines) or not axes.axison for axes in made.axes] == [True] * 4


def test_hostile_names_are_drawn_as_text(tmp_path):
    folder = run(tmp_path / "a", EVIL, sites=[f"{EVIL}.layers.0.attention_norm"])
    made = results.find([folder])
    for name in ("pn.figure2", "pn.figure7", "tears.figure2", "un.figure4"):
        text = figures.draw(name, made, tmp_path / f"{name}.svg")[0].read_text()
        assert "<script" not in text


def test_a_name_that_looks_like_a_formula_hides_no_picture(tmp_path, monkeypatch):
    """The statistics picture was left out, without a message."""
    monkeypatch.chdir(tmp_path)
    found = results.find([run(Path(name), "batch") for name in ("a$b_{x$", "c$d_{x$")])
    assert "$d_{x$" in plot.statistics(found, tmp_path / "a.svg").read_text()
    row = dict.fromkeys(("ms", "low", "ratio", "high"), 1) | {"norm": "un $_{$", "shape": "8x4 $_{$", "dtype": "bf16"}
    assert "un $_{$" in speed.ratios([row], tmp_path / "b.svg").read_text()


def test_runs_without_an_encoder_are_in_the_legend(tmp_path):
    folders = run(tmp_path / "a", "un"), run(tmp_path / "b", "un", ["decoder.layers.0.attention_norm"], data="ptb")
    figure, _ = figures.FIGURES["tears.figure3"].draw(recorded(results.find(folders)))
    assert len(figure.legends[0].get_texts()) == 2


def test_other_norms_are_not_called_pnv(tmp_path):
    figure, _ = figures.FIGURES["pn.figure4"].draw(recorded(results.find([run(tmp_path / "a", "batch")])))
    titles = [axes.get_legend().get_title().get_text() for axes in figure.axes if axes.get_legend()]
    assert titles == ["BN", "all norms, for lack of PN-V"]


def test_long_curves_are_smoothed_fast_and_exactly():
    values = [random.Random(0).random() for _ in range(3000)]
    values[500] = 1e30
    found = curves.smooth(values, 60)
    assert found == pytest.approx([sum(part := values[max(0, i - 59) : i + 1]) / len(part) for i in range(3000)])
    assert curves.smooth([], 60) == []


def test_outliers_survive_thinning():
    values = [1.0] * 5000
    values[3217], values[1200] = 99.0, -5.0
    steps, kept = curves.extremes(range(5000), values, 100)
    assert len(kept) <= 100
    assert {(3217, 99.0), (1200, -5.0)} <= set(zip(steps, kept, strict=True))
    assert steps == sorted(steps)


def test_growing_file_is_read_to_its_last_whole_line(tmp_path):
    (tmp_path / "rows.csv").write_text("step,site,norm,quantity,value\n1,a,un,rms,2.0\n1,b,un,rms,0.")
    assert read_run(tmp_path).of("rms") == {"a": ("un", [1], [2.0])}
    (tmp_path / "rows.csv").write_text("step,si")
    assert read_run(tmp_path).quantities == {}


def test_runs_without_a_result_can_be_drawn(tmp_path):
    folder = run(tmp_path / "a", "batch")
    made = results.read(folder)
    (folder / "result.json").unlink()
    with pytest.raises(ValueError, match=r"no result\.json"):
        results.find([tmp_path])
    (folder / "run.json").write_text('{"task": "mt", "data": "d", "steps": 400, "model": {"norm": "batch"}}')
    assert results.find([tmp_path], unfinished=True)[folder]["status"] == "starting"
    results.note(folder, 3, made["curve"], made["valid"])
    found = results.find([tmp_path], unfinished=True)
    assert found[folder]["curve"] == made["curve"]
    assert figures.draw("pn.figure2", found, tmp_path / "x.svg")[0].exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "study": 3}'])
def test_a_file_that_is_no_table_of_a_study_is_named(tmp_path, text):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no table of a study"):
        study_tables.find([tmp_path])
    assert study_tables.find([tmp_path / "tables" / "x.json"]) == []


@pytest.mark.parametrize(
    "name", [name for name, row in figures.FIGURES.items() if "_" in row.needs and " " in row.needs]
)
def test_file_cut_within_a_step_is_drawn_or_raises(tmp_path, name):
    """A run in progress has only some quantities of its first step."""
    folder = run(tmp_path / "a", "pnv", sites=["first", "second"], samples=2)
    lines = (folder / "rows.csv").read_text().splitlines(keepends=True)
    made = results.find([folder])
    for end in (5, 17, 25, 38, 45):
        (folder / "rows.csv").write_text("".join(lines[:end]))
        try:
            figures.draw(name, made, tmp_path / "a.svg")
        except ValueError as error:
            assert str(error).startswith(name)  # noqa: PT017


@pytest.mark.parametrize(
    ("norm", "norm_at", "folds"),
    [("batch", {}, True), ("un(window=4)", {}, True), ("power(groups=0)", {}, True), ("nonorm", {}, True),
     ("power", {}, False), ("dyt", {}, False), ("derf", {}, False), ("layer", {}, False), ("rms", {}, False),
     ("layer", {"encoder.*": "batch"}, False), ("pnv", {"final": "un"}, True), ("of another version", {}, False)],
)  # fmt: skip
def test_lines_are_solid_only_if_all_norms_fold_away(norm, norm_at, folds):
    made = result(norm, steps=400)
    made["run"]["model"]["norm_at"] = norm_at
    assert folds_away(Recorded("", made, Recording())) == folds
