"""Reports: tables of runs, figures of the papers, and the page, also in a real browser."""

import math
import os
import shutil

import made_results
import pytest
from made_results import result, score, write
from normkit_papers import figures, results
from normkit_papers.report import charts, page, summary
from normkit_papers.report.recorded import recorded

from normkit.watch import read_run

QUANTITIES = (
    "distance_mean", "distance_var", "distance_quadratic", "g_mu", "g_sigma2", "g_psi2", "gradient_norm", "learned_g",
    "filtered", "pnac_activation", "pnac_gradient", "channel_activation", "channel_activation_am",
    "channel_activation_gm", "channel_gradient", "channel_gradient_am",
    *(f"gamma_over_psi_{name}" for name in ("min", "q25", "median", "q75", "max")),
)  # fmt: skip
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    write(place / "batch", result("batch", 21.3, calibrated=12.0), QUANTITIES)
    write(place / "pnv", result("pnv", 13.9), QUANTITIES)
    write(place / "more", result("pnv", 12.9, batch_tokens=1000), QUANTITIES)
    write(place / "smooth", result("un(window=4)", 10.2, label_smoothing=0.0), QUANTITIES)
    write(place / "digits", result("batch", task="digits", data="digits"), QUANTITIES)
    write(place / "un", result("un(window=4)", 10.2, calibrated=10.1), QUANTITIES)
    extra = [f"500,embedding,,singular_value[{i}],{5 / (i + 1)}" for i in range(9)]
    extra += [f"500,{a}|{b},,cka,{1.0 if a == b else 0.5}" for a in "abc" for b in "abc"]
    with (place / "un" / "rows.csv").open("a") as file:
        file.write("\n".join(extra) + "\n")
    return results.find([place])


# -- tables -----------------------------------------------------------------------------------------------------------


def table(made):
    """Rows of the table of one task, by label."""
    (members,) = summary.groups(made).values()
    head, *lines = summary.cells(members)
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_runs_of_several_seeds_are_one_row_with_its_interval():
    made = {
        (name, n): result(name, start + n, seed=n) for name, start in (("un", 31.0), ("layer", 34.0)) for n in range(3)
    }
    row = table(made)["un"]
    assert (row["seeds"], row["PER greedy"], row["to the best"]) == ("3", "32.0 ± 2.5", "best")
    assert table(made)["layer"]["to the best"] == "3.00 ± 2.27"
    assert not row.keys() & {"status", "folds", "greedy, folded"}, "columns without information"
    made["un", 3] = result("un", seed=3, status="diverged at step 7")
    assert table(made)["un"]["status"] == "1 of 4 diverged at step 7"


def test_one_seed_has_the_sampling_error_and_a_folded_run_its_times():
    un = result("un", 10.0, calibrated=9.0)
    un["scores"]["folded"] = score(10.0)
    un["fold"] = {"foldable": "9 of 10", "max_error": 3e-14, "seconds_trained": 0.2, "seconds_folded": 0.15}
    found = table({1: un, 2: result("layer", 10.9)})
    assert found["layer"]["to the best"] == f"0.90 ± {1.96 * math.hypot(0.35, 0.35):.2f}"
    shown = ("greedy, calibrated", "greedy, folded", "folds", "ms as trained", "ms folded", "largest error")
    assert [found["un"][name] for name in shown] == ["9.0 ± 0.7", "10.0 ± 0.7", "9 of 10", "200.0", "150.0", "3e-14"]
    (members,) = summary.groups({1: un, 2: result("layer", 10.9)}).values()
    (times,) = charts.folding(members)
    assert [list(bars.x) for bars in times.data] == [[200.0, None], [150.0, None]]
    assert charts.folding(members[1:]) == []


def test_a_path_that_is_no_run_is_named(tmp_path):
    (tmp_path / "model.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"model\.py is no run"):
        results.find([tmp_path / "model.py"])


def test_a_damaged_result_is_named(tmp_path):
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 99}', "\xff"):
        (tmp_path / "result.json").write_bytes(text.encode("latin1"))
        with pytest.raises(ValueError, match=r"result\.json"):
            results.find([tmp_path])


# -- figures of the papers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_drawn_with_finite_values(runs, name):
    figure, left_out = figures.draw(name, runs)
    assert figure.data
    assert len(left_out) < len(runs)
    for trace in figure.data:
        assert trace.type == "heatmap" or len(trace.y if trace.y is not None else trace.median)


def test_the_figures_show_the_recorded_numbers(runs):
    figure, left_out = figures.draw("pn.figure2", runs)
    folder = next(path for path in runs if path.name == "batch")
    series = read_run(folder).of("distance_mean")[made_results.SITES[0]]
    trace = next(trace for trace in figure.data if trace.name.startswith("batch") and "digits" not in trace.name)
    assert list(trace.y) == [value for _, value in series.points()]
    assert list(trace.x)[:2] == [100 / 500, 100 * 13 / 500]
    assert {label.split(",")[0] for label in left_out} == {"pnv", "un(window=4)"}, "they have no BatchNorm"
    figure, _ = figures.draw("pn.figure5", runs)
    points = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data}
    assert points["pnv"] == ([500, 1000], [13.9, 12.9])
    (trace,) = figures.draw("un.figure6", runs)[0].data
    assert [list(line) for line in trace.z] == [[1, 0.5, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 1]]


def test_missing_quantities_are_named(tmp_path):
    write(tmp_path / "a", result("batch"), ["distance_mean"])
    with pytest.raises(ValueError, match=r"pn\.figure2: .*distance_var"):
        figures.draw("pn.figure2", results.find([tmp_path]))
    with pytest.raises(ValueError, match=r"pn\.figure8"):
        figures.draw("pn.figure8", {})


# -- the page ---------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_leave_the_page_whole(tmp_path):
    made = result("un", status="diverged at step 7")
    made["curve"][3]["train_loss"] = math.inf
    made["valid"] = [{"step": 1, "loss": math.nan}]
    found = page.make([write(tmp_path, made)], "diverged").write(tmp_path / "p.html").read_text()
    assert "diverged at step 7" in found


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


FITTED = """width => {
    const charts = [...document.querySelectorAll(".js-plotly-plot .main-svg:first-child")];
    const boxes = charts.map(each => each.getBoundingClientRect());
    const beside = boxes.filter(box => box.top === boxes[0].top);
    return beside.reduce((sum, box) => sum + box.width, 0) <= width && boxes.every(box => box.right <= width);
}"""


def test_the_page_in_a_browser(runs, tmp_path):
    """Nothing is loaded or run but the page's own script, and charts fit phones and dark screens."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path, and CHROMIUM does not name one")
    made = {folder: {**each, "run": {**each["run"], "name": EVIL}, "command": EVIL} for folder, each in runs.items()}
    made[next(iter(made))]["run"]["model"] = {"norm": EVIL}
    report = page.Page(EVIL)
    page.add_runs(report, made)
    path, troubles, requests = report.write(tmp_path / "report.html"), [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        for width, scheme in ((390, "dark"), (1280, "light")):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
            tab = context.new_page()
            tab.on("console", lambda message: troubles.append(message.text))
            tab.on("pageerror", lambda error: troubles.append(str(error)))
            tab.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto(path.as_uri())
            tab.wait_for_selector(".js-plotly-plot .scatterlayer path.js-line", state="attached")
            assert tab.locator(".js-plotly-plot").count() == 3, "two losses, statistics"
            tab.wait_for_function(FITTED, arg=width)  # Plotly sizes charts once more after it drew them
            boxes = [each.bounding_box() for each in tab.locator(".js-plotly-plot .main-svg:first-child").all()]
            assert len({(round(box["x"] / 99), round(box["y"] / 99)) for box in boxes}) == 3
            assert all(box["x"] + box["width"] <= width for box in boxes)
            beside = [box for box in boxes if box["y"] == boxes[0]["y"]]
            assert sum(box["width"] for box in beside) <= width, "charts lie beside each other"
            assert EVIL in tab.locator("h1").inner_text()
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            shown = tab.locator("section .js-plotly-plot path.js-line").first
            before, about = shown.get_attribute("d"), tab.locator("section p").inner_text()
            tab.locator("select").select_option("g_mu")
            playwright.expect(shown).not_to_have_attribute("d", before, timeout=20_000)
            assert tab.locator("section p").inner_text() != about
            context.close()
        browser.close()
    assert not troubles
    assert set(requests) == {path.as_uri()}


def test_recorded_runs_of_several_seeds_have_names_of_their_own(tmp_path):
    for seed in (0, 1):
        write(tmp_path / str(seed), result("un", seed=seed), ["length"])
    assert {run.label for run in recorded(results.find([tmp_path]))} == {"un, seed=0", "un, seed=1"}
