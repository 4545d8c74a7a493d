"""Table, conclusions, figures and page made from result files."""

import base64
import copy
import hashlib
import html.parser
import json
import math
import re

import made_results
import pytest
from made_results import result, score
from normkit_papers.report import page, plot, summary
from normkit_papers.report.panels import panels
from normkit_papers.report.settings import labels
from normkit_papers.report.verdict import sentences

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


# -- labels and table ------------------------------------------------------------------------------------------------


def test_labels_are_different():
    def named(*made):
        return list(labels(dict(enumerate(made))).values())

    assert named(result("un(warmup=5)"), result("power(groups=0, warmup=5)")) == ["un", "power(groups=0)"]
    assert named(result("un(warmup=5)"), result("power(warmup=6)")) == ["un(warmup=5)", "power(warmup=6)"]
    assert named(result("un"), result("un(warmup=5)"), result("pnv(warmup=5)"))[1:] == ["un(warmup=5)", "pnv(warmup=5)"]
    assert named(result("un(window=4)"), result("un(window=8)")) == ["un(window=4)", "un(window=8)"]
    assert named(result("scale"), result("layer")) == ["scale + FixNorm", "layer"]
    assert named(result(seed=1), result(seed=2)) == ["layer, seed=1", "layer, seed=2"]
    assert named(result(), result()) == ["layer, 0", "layer, 1"]
    mixed = result()
    mixed["run"]["model"]["norm_at"] = {"encoder.*": "un"}
    assert named(mixed) == ["layer (encoder.*: un)"]
    other = result(seed=1)
    other["run"].update(task="digits", data="digits", lr=1.0)
    assert named(result(), other) == ["layer, g2p, cmudict", "layer, digits"]
    assert named(result(seed=1), result(seed=2), other) == ["layer, seed=1", "layer, seed=2", "layer"]


def test_the_figures_of_the_table_are_those_of_the_results(tmp_path):
    made = made_results.demo(tmp_path)
    for row, (folder, one) in zip(summary.rows(made), made.items(), strict=True):
        assert row["norm"].text == labels(made)[folder]
        assert row["parameters"].value == one["parameters"]
        assert row["loss"].value == one["scores"]["running"]["loss"]
        for kind in ("running", "donors", "calibrated", "beam"):
            found = row[f"PER {kind}"]
            if kind in one["scores"]:
                assert found == (f"{one['scores'][kind]['per']:.1f}", one["scores"][kind]["per"], 0.35)
            else:
                assert found == ("=", one["scores"]["running"]["per"], None)
        assert row["WER"].value == one["scores"]["beam"]["wer"]
        assert row["words/s train"].value == one["speed"]["train_words_per_s"]
        assert row["words/s infer"].text == "800"
        assert row["foldable"].text == one["fold"]["foldable"]
        assert row["status"].text == "done"
    line = next(line for line in summary.table(made).splitlines() if line.startswith("batch"))
    assert " ".join(line.split()) == "batch 381,547 1.032 21.3 9.7 12.0 20.9 - 73.2 1,221 800 0 of 2 done"
    head, *cells = summary.cells(made)
    assert head == list(summary.rows(made)[0])
    assert cells[-1][:4] == ["batch", "381,547", "1.032", "21.3"]


def test_columns_are_there_only_where_a_result_fills_them():
    lm = result("un", 1.0, task="lm", data="pydoc")
    lm["scores"] = {"running": {"loss": 3.0, "perplexity": 20.1, "n": 500}, "batch": {"loss": 2.9, "perplexity": 18.2}}
    lm["speed"], lm["fold"] = {}, None
    assert summary.cells({1: lm})[0] == [
        "norm",
        "parameters",
        "loss",
        "perplexity running",
        "perplexity own",
        "status",
    ]
    both = summary.table({1: lm, 2: result()})
    assert both.startswith("lm on pydoc\n")
    assert "\n\ng2p on cmudict\n" in both


def test_the_speed_of_image_models_is_in_images():
    made = {"text": result(), "pictures": result(task="images", data="cifar10")}
    for one, unit, other in (("text", "words", "images"), ("pictures", "images", "words")):
        row = summary.rows(made)[list(made).index(one)]
        assert row[f"{unit}/s train"].value == made[one]["speed"]["train_words_per_s"]
        assert row[f"{other}/s train"].text == "-"
        assert f"{unit}/s" in summary.table({one: made[one]})
        assert f"{other}/s" not in summary.table({one: made[one]})


def test_a_diverged_run_is_in_the_table():
    made = {1: result("layer", 9.9), 2: result("batch", status="diverged at step 1500")}
    made[2]["scores"] = {}
    assert summary.cells(made)[2] == ["batch", "381,547", *["-"] * 4, "1,210", "800", "0 of 2", "diverged at step 1500"]
    assert summary.table(made).splitlines()[-1].endswith("  diverged")
    assert "batch: diverged at step 1500, no score." in sentences(made)


def test_the_table_is_never_wider_than_a_terminal(tmp_path):
    made = made_results.demo(tmp_path)
    for number, one in enumerate(made.values()):
        one["run"]["model"]["norm"] = f"un{number}(" + "window=4, " * 20 + ")\x1b[31m\n"
    text = summary.text(made)
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.splitlines())


def test_the_best_of_a_column_is_the_least_or_the_most():
    made = {1: result("layer", 9.0), 2: result("un", 10.0)}
    assert {title for folder, title in summary.best(made) if folder == 1} == {"loss", "PER running", "PER beam", "WER"}
    assert {title for folder, title in summary.best(made) if folder == 2} == {"words/s train"}


# -- conclusions -----------------------------------------------------------------------------------------------------


def verdict(*made):
    return " ".join(sentences(dict(enumerate(made))))


def test_the_verdict_turns_when_the_figures_turn():
    one, two = result("layer", 9.9), result("pnv", 13.9, statistics=(9.8, 10.2))
    assert "Best with running statistics is layer, PER 9.9; behind: pnv 13.9." in verdict(one, two)
    assert "pnv loses by its running statistics: PER 13.9, against 9.8" in verdict(one, two)
    assert "calibration repairs 90% of that (10.2)" in verdict(one, two)
    one, two = result("layer", 13.9), result("pnv", 9.9, statistics=(9.8, 10.2))
    assert "Best with running statistics is pnv, PER 9.9; behind: layer 13.9." in verdict(one, two)
    assert "Running statistics lose nothing beyond sampling error against those of other" in verdict(one, two)
    assert "loses" not in verdict(one, two)


def test_two_sampling_errors_decide_what_differs():
    margin = 2 * math.hypot(0.35, 0.35)
    assert "within sampling error of it: un" in verdict(result("layer", 10.0), result("un", 10.0 + margin - 0.01))
    assert "behind: un" in verdict(result("layer", 10.0), result("un", 10.0 + margin + 0.01))
    sure = result("un", 10.0 + margin - 0.01)
    sure["scores"]["running"]["per_error"] = 0.1
    assert "behind: un" in verdict(result("layer", 10.0), sure)


def test_calibration_without_gain_is_not_recommended():
    assert "calibration makes it worse (22.0)" in verdict(result("batch", 18.0, statistics=(10.0, 22.0)))
    assert "calibration does not repair it (18.1)" in verdict(result("batch", 18.0, statistics=(10.0, 18.1)))
    assert "repairs 5% of that (17.6, within sampling error)" in verdict(result("batch", 18.0, statistics=(10.0, 17.6)))
    without = result("batch", 18.0, statistics=(10.0, 11.0))
    del without["scores"]["calibrated"]
    assert verdict(without).endswith("against 10.0 with those of other items of the same lengths.")


def test_direction_of_accuracy_and_perplexity():
    made = []
    for norm, accuracy in (("layer", 97.0), ("batch", 80.0)):
        one = result(norm, task="digits", data="digits")
        one["scores"] = {"running": {"loss": 1.0, "accuracy": accuracy, "n": 360}}
        made.append(one)
    assert "is layer, accuracy 97.0; behind: batch 80.0." in verdict(*made)  # the error follows from n
    for one, perplexity in zip(made, (30.0, 20.0), strict=True):
        one["scores"] = {"running": {"loss": 1.0, "perplexity": perplexity, "n": 360}}
    assert "is batch, perplexity 20.0; behind: layer 30.0; no sampling error is known" in verdict(*made)


def test_folding_and_timing_are_reported_as_measured():
    one = result("un", 10.2, statistics=(10.1, 10.1))
    one["scores"]["folded"] = score(10.4)
    one["fold"] |= {"foldable": "9 of 10", "max_error": 2e-14}
    pair = {"a": "un folded", "b": "layer", "ratio": 1.2, "low": 1.1, "high": 1.3, "n": 15}
    one["timing"] = {"what": "seconds", "pairs": [pair]}
    assert "un folded: 9 of 10 norms are gone, outputs differ by at most 2e-14, PER 10.4 (before 10.2)." in verdict(one)
    assert "un folded takes 1.20 of the time of layer (1.10 to 1.30 in 15 turns): slower." in verdict(one)
    pair |= {"ratio": 0.8, "low": 0.7, "high": 0.9}
    assert "turns): faster." in verdict(one)
    pair |= {"high": 1.01}
    assert "turns): no clear difference." in verdict(one)
    one["timing"]["obstacle"] = "this machine is too noisy"
    assert "Speed was not compared: this machine is too noisy." in verdict(one)
    assert "turns)" not in verdict(one)


def test_runs_that_differ_in_more_than_their_norm_are_named():
    assert "Mind that the runs differ in more than their norms: steps (5000, 400)." in verdict(
        result(), result(steps=400)
    )
    assert "Mind" not in verdict(result("layer"), result("un"))
    assert "batches bucketed by length, seed 0." in verdict(result("layer"), result("un"))
    assert "batches of any lengths, not bucketed" in verdict(result(bucketing=False))


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_results_give_the_same_figure(tmp_path, suffix):
    made = made_results.demo(tmp_path)
    for draw in (plot.curves, plot.statistics):
        first, second = (draw(made, tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert first == second
        assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    made[tmp_path / "un"]["valid"][-1]["loss"] += 0.1
    assert plot.curves(made, tmp_path / f"a.{suffix}").read_bytes() != (tmp_path / f"b.{suffix}").read_bytes()


def test_figures_have_titles_and_labels(tmp_path):
    made = made_results.demo(tmp_path)
    made[tmp_path / "layer"]["run"]["model"]["norm"] = "$\\bad{$ <&>"
    curves = plot.curves(made, tmp_path / "curves.svg").read_text()
    assert all(f">{name}</text>" in curves for name in ("scale + FixNorm", "power(groups=0)", "training loss", "pnv"))
    assert "$\\bad{$ &lt;&amp;&gt;</text>" in curves
    statistics = plot.statistics(made, tmp_path / "statistics.svg").read_text()
    assert all(f">{title}</text>" in statistics for title in ("batch: mean", "batch: variance", "un: quadratic mean"))


def test_figures_that_cannot_be_made_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"\.svg"):
        plot.curves({tmp_path: result()}, tmp_path / "curves.gif")
    with pytest.raises(ValueError, match=r"rows\.csv"):
        plot.statistics({tmp_path: result()}, tmp_path / "statistics.png")
    with pytest.raises(ValueError, match="no learning curve"):
        plot.curves({tmp_path: result() | {"curve": [], "valid": []}}, tmp_path / "curves.png")


def test_a_curve_that_diverged_is_drawn_as_far_as_it_goes(tmp_path):
    made = result(status="diverged at step 1500")
    made["curve"][-1]["train_loss"] = math.nan
    assert plot.curves({tmp_path: made}, tmp_path / "curves.svg").stat().st_size > 1000
    assert "NaN" not in data(page.write({tmp_path: made}, tmp_path / "report.html"))[1]


def test_rows_become_panels(tmp_path):
    lines = ["step,site,norm,quantity,value", "1,a,pnv,distance_quadratic,2.0", "1,b,pnv,distance_quadratic,4.0"]
    lines += ["3,a,pnv,distance_quadratic,nan", "3,c,pnv,distance_quadratic,1.0", "3,a,pnv,other,1.0"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    (panel,) = panels({tmp_path: result("pnv")})
    assert (panel.title, panel.steps) == ("pnv: quadratic mean", [1, 3])
    assert panel.sites == {"a": [2.0, None], "b": [4.0, None], "c": [None, 1.0]}
    assert panel.median() == [3.0, 1.0]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,site,norm,quantity,value\n1,a,pnv,distance_mean\n", "\xff\n"])
def test_rows_that_cannot_be_read_are_refused(tmp_path, text):
    (tmp_path / "rows.csv").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"rows\.csv"):
        panels({tmp_path: result("pnv")})


# -- page ------------------------------------------------------------------------------------------------------------


class Reader(html.parser.HTMLParser):
    """Elements of a page with their attributes, its text, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.within, self.inside = [], "", [], {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.within.append(tag)
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag):
        while self.within and self.within.pop() != tag:
            pass

    def handle_data(self, data):
        if self.within and self.within[-1] in self.inside:
            self.inside[self.within[-1]][-1] += data
        else:
            self.text += data


def data(path):
    text = path.read_text()
    found = Reader(text)
    return json.loads(found.inside["script"][0]), found.inside["script"][0], found


def test_every_string_of_a_file_is_text(tmp_path):
    made = made_results.demo(tmp_path)
    one = made[tmp_path / "un"]
    one["run"]["model"]["norm"] = one["run"]["name"] = one["status"] = one["command"] = EVIL
    one["run"]["task"] = one["run"]["evil" + EVIL] = EVIL
    one["where"]["device"] = one["where"][EVIL] = EVIL
    one["fold"]["foldable"] = one["timing"]["what"] = one["timing"]["pairs"][0]["a"] = EVIL
    one["fold"]["rows"] = [{"name": EVIL, "action": EVIL, "into": [EVIL], "why": EVIL}]
    one["scores"][EVIL] = {EVIL: 1.0}
    rows = tmp_path / "un" / "rows.csv"
    rows.write_text(rows.read_text().replace("encoder.layers.0.attention_norm", EVIL.replace('"', "")))
    path = page.write(made, tmp_path / "report.html", title=EVIL, command=EVIL)
    values, script, found = data(path)
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert "<" not in script
    assert found.text.count(EVIL) > 15
    assert values["runs"][2]["name"] == EVIL
    assert EVIL.replace('"', "") in values["statistics"][0]["panels"][0]["sites"]
    clean = Reader(page.write(made_results.demo(tmp_path), tmp_path / "clean.html").read_text())
    assert set(tags) == {tag for tag, _ in clean.elements}


def test_page_loads_nothing_and_runs_only_its_script(tmp_path):
    path = page.write(made_results.demo(tmp_path), tmp_path / "report.html", title="t", command="normkit demo")
    _, _, found = data(path)
    links = [value for _, given in found.elements for name, value in given.items() if name in ("src", "href", "srcset")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import", found.inside["style"][0])
    code = found.inside["script"][1]
    assert re.findall(r"https?://[^\"]*", code) == ["http://www.w3.org/2000/svg"]  # the name of SVG, no address
    assert not re.search(r"\b(eval|fetch|innerHTML|outerHTML|insertAdjacentHTML|XMLHttpRequest|import)\b", code)
    policy = next(given["content"] for _, given in found.elements if given.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert path.stat().st_size < 300_000


def test_the_page_has_the_figures_settings_and_origin(tmp_path):
    made = made_results.demo(tmp_path)
    values, _, found = data(
        page.write(made, tmp_path / "report.html", title="A title", command="normkit demo --seed 0")
    )
    shown = [float(given["data-value"]) for tag, given in found.elements if tag == "td" and given.get("data-value")]
    assert shown == [cell.value for row in summary.rows(made) for cell in row.values() if cell.value is not None]
    for sentence in [*sentences(made), "A title", "normkit demo --seed 0", "0123456789abcdef", "un(warmup=500)"]:
        assert sentence in found.text
    assert [chart["title"] for chart in values["curves"]] == ["Training loss", "Validation loss"]
    validation = values["curves"][1]["lines"][0]
    valid = next(iter(made.values()))["valid"]
    assert validation["x"] == [point["step"] for point in valid]
    assert validation["y"] == pytest.approx([point["loss"] for point in valid], rel=1e-3)
    assert [run["name"] for run in values["runs"]] == list(labels(made).values())
    assert {one["name"]: len(one["panels"]) for one in values["statistics"]} == {
        "distance_quadratic": 3,
        "distance_mean": 1,
        "distance_var": 1,
    }
    assert (
        page.write(made, tmp_path / "again.html", title="A title", command="normkit demo --seed 0").read_bytes()
        == (tmp_path / "report.html").read_bytes()
    )


def test_a_page_of_an_interrupted_run_leaves_out_empty_sections(tmp_path):
    made = result(status="interrupted at step 1")
    made |= {"curve": [], "valid": [], "speed": {}, "fold": None, "scores": {}, "command": ""}
    values, _, found = data(page.write({tmp_path: made}, tmp_path / "report.html"))
    assert (values["curves"], values["statistics"]) == ([], [])
    assert "layer: interrupted at step 1, no score." in found.text
    assert not {"Learning curves", "Folding", "Timing"} & set(found.text.split("\n"))
    with pytest.raises(ValueError, match="no results"):
        page.write({}, tmp_path / "report.html")


def test_lines_are_thinned_until_the_page_is_small(tmp_path, monkeypatch):
    made = made_results.demo(tmp_path)
    full = page.write(made, tmp_path / "report.html").stat().st_size
    monkeypatch.setattr(page, "LIMIT", full // 2)
    values, _, _ = data(page.write(made, tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size < full // 2
    line = values["curves"][0]["lines"][0]
    assert len(line["x"]) == len(line["y"]) <= 100
    assert (line["x"][0], line["x"][-1]) == (1, 5000)
    monkeypatch.setattr(page, "POINTS", (page.POINTS[0], 0))  # nothing between all and no statistics
    values, _, found = data(page.write(made, tmp_path / "report.html"))
    assert values["statistics"] == []
    assert values["curves"]
    assert page.CROWDED in found.text
    monkeypatch.setattr(page, "LIMIT", 1000)
    with pytest.raises(ValueError, match="show fewer"):
        page.write(made, tmp_path / "report.html")


def test_many_runs_stay_below_three_megabytes(tmp_path):
    made = {}
    for seed in range(40):
        folder = tmp_path / str(seed)
        made[folder] = copy.deepcopy(result("batch", statistics=(9.0, 9.5), seed=seed))
        made_results.rows(folder, "batch")
    assert page.write(made, tmp_path / "report.html").stat().st_size < 3_000_000
