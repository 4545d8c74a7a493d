"""The page of results in a browser: no error, no request.

Mouse and keyboard reach everything.
"""

import os
import shutil

import made_results
import pytest
from normkit_papers.report import page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'
FIRST = "#curves figure:first-child"


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path, and CHROMIUM does not name one")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    made = made_results.demo(folder)
    made[folder / "un"]["run"]["name"] = made[folder / "un"]["where"]["device"] = EVIL
    made[folder / "scale"]["run"]["model"]["norm"] = EVIL
    runs = [{"status": EVIL}]
    cell = {"printed": "35.9", "ours": True, "runs": runs, "n": 2, "mean": 31.22, "spread": 0.14}
    column = {"title": EVIL, "about": EVIL, "digits": 1}
    study = dict.fromkeys(("study", "title", "source", "claim", "note", "scale"), EVIL)
    study |= {"schema": 1, "columns": [column], "rows": [{"label": EVIL, "cells": [cell]}]}
    sections = page.PageSections(
        {"distance_var": "what it is"}, {folder / "un": [EVIL]}, {folder / "un": [EVIL]}, [study]
    )
    return page.write(made, folder / "report.html", title=EVIL, command=EVIL, sections=sections)


@pytest.fixture
def visit(browser, report):
    """Open the page at a width; at the end there must be no error and no request."""
    contexts, troubles, requests = [], [], []

    def opened(width=1280, scheme="light", touch=False):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch, offline=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(report.as_uri())
        tab.wait_for_selector(f"{FIRST} path.line", state="attached")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not troubles
    assert set(requests) == {report.as_uri()}


def column(tab, place):
    return tab.locator(f"table.sortable tbody tr > :nth-child({place})").all_inner_texts()


def test_content_of_files_is_shown_and_not_run(visit):
    tab = visit()
    assert tab.title() == EVIL
    assert tab.locator("h1").inner_text() == EVIL
    assert EVIL in column(tab, 1)[1]
    assert tab.locator("img").count() == 0
    assert tab.locator("#curves .toggles button").all_inner_texts()[1].startswith("<script>")


def test_a_head_sorts_by_click_and_by_key(visit):
    tab = visit()
    norms = column(tab, 1)
    speed = tab.get_by_role("button", name="words/s train")
    speed.click()
    speed.click()
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert column(tab, 1)[0] == "batch"
    donors = tab.get_by_role("button", name="PER donors")
    donors.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("th[aria-sort]").count() == 1
    assert column(tab, 1)[:2] == ["batch", "pnv"]
    assert column(tab, 5)[:2] == ["9.7 ±0.69", "9.9 ±0.69"]
    tab.get_by_role("button", name="norm", exact=True).click()
    assert column(tab, 1) == sorted(norms, key=str.lower)


def test_a_norm_is_hidden_and_shown_again(visit):
    tab = visit()
    lines = tab.locator("#curves g path.line")
    assert lines.count() == 12
    button = tab.locator("#curves .tools").get_by_role("button", name="batch")
    button.focus()
    tab.keyboard.press("Space")
    assert (lines.count(), button.get_attribute("aria-pressed")) == (10, "false")
    assert tab.locator("#curves .c5 >> visible=true").count() > 0  # in the legend
    assert tab.locator("#curves g path.c5").count() == 0
    button.click()
    assert (lines.count(), button.get_attribute("aria-pressed")) == (12, "true")


def test_many_runs_are_named_in_the_legend_alone(browser, tmp_path):
    made = {tmp_path / str(seed): made_results.result(seed=seed) for seed in range(45)}
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(page.write(made, tmp_path / "report.html").as_uri())
    lines, chart = tab.locator("#curves g path.line"), tab.locator(f"{FIRST} svg.chart")
    assert (lines.count(), chart.locator("text.name").count()) == (90, 0), "45 names do not fit beside the lines"
    tab.get_by_role("button", name="hide or show all").click()
    assert tab.locator("#curves figure >> visible=true").count() == 0
    tab.locator("#curves .toggles").get_by_role("button", name="layer, seed=7").click()
    assert [tab.locator("#curves figure").nth(i).locator("g path.line").count() for i in (0, 1)] == [1, 1]
    tab.get_by_role("button", name="hide or show all").click()
    tab.get_by_role("button", name="hide or show all").click()
    assert lines.count() == 90
    assert tab.evaluate("document.querySelector('#curves .tools').clientHeight") < 300
    tab.close()


def test_hovering_shows_the_values(visit):
    tab = visit()
    chart = tab.locator(f"{FIRST} svg.chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tip = tab.locator(f"{FIRST} .tip")
    assert tip.is_hidden()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert tip.inner_text().startswith("step 3,") or tip.inner_text().startswith("step 2,")
    assert tip.locator("div").count() == 7
    assert "power(groups=0)" in tip.inner_text()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] - 50)
    assert tip.is_hidden()


def test_statistics_tell_the_place_that_is_near(visit):
    tab = visit()
    chart = tab.locator("#statistics svg.chart").nth(1)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + 150, box["y"] + 20)
    text = tab.locator("#statistics .tip >> visible=true").inner_text()
    assert "median" in text
    assert "coder.layers." in text
    assert tab.locator("#statistics .near").count() == 1
    assert tab.locator("#statistics .hair").count() == 3  # all panels show the same step


def test_menus_choose_the_quantity_and_what_has_a_chart(visit):
    tab = visit()
    quantity, each = (tab.locator("#statistics select").nth(place) for place in (0, 1))
    titles = tab.locator("#statistics figcaption")
    assert titles.all_inner_texts() == ["un", "power(groups=0)", "pnv"]
    quantity.select_option("distance_var")
    assert titles.all_inner_texts() == ["batch"]
    assert tab.locator("#about").inner_text() == "what it is"
    quantity.select_option("distance_quadratic")
    each.select_option("place")
    assert titles.all_inner_texts() == list(made_results.SITES)
    assert tab.locator("#statistics figure:first-child path.line").count() == 3
    tab.locator("#statistics .tools").get_by_role("button", name="pnv").click()
    assert tab.locator("#statistics figure:first-child path.line").count() == 2
    each.select_option("run")
    assert titles.locator("visible=true").all_inner_texts() == ["un", "power(groups=0)"]  # it stays hidden


def test_rows_are_filtered_by_words(visit):
    tab = visit()
    field, status = tab.locator("input[type=search]"), tab.locator("#table [role=status]")
    field.fill("power 10.7")
    assert tab.locator("table.sortable tbody tr >> visible=true").count() == 1
    assert status.inner_text() == "1 of 6 rows"
    field.fill("")
    assert tab.locator("table.sortable tbody tr >> visible=true").count() == 6


def test_findings_and_studies_are_text(visit):
    tab = visit()
    assert tab.locator("#findings > ul li").all_inner_texts() == [f"{EVIL} (un)"]
    tab.locator("#findings summary").click()
    assert tab.locator("#findings li >> visible=true").count() == 2
    assert "paper 35.9" in tab.locator("#studies tbody").inner_text()
    assert "ours 31.2 ± 0.1 (2)" in tab.locator("#studies tbody").inner_text()


def steps(tab):
    texts = tab.locator(f"{FIRST} svg.chart text").all_text_contents()
    return [int(text.replace(",", "")) for text in texts if text.replace(",", "").isdecimal() and len(text) > 2]


def test_dragging_zooms_and_escape_shows_all(visit):
    tab = visit()
    whole = steps(tab)
    chart = tab.locator(f"{FIRST} svg.chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + 150, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 250, box["y"] + 90, steps=4)
    assert tab.locator(f"{FIRST} .brush").count() == 1
    tab.mouse.up()
    zoomed = steps(tab)
    assert zoomed != whole
    assert max(zoomed) < 4000
    chart.focus()
    tab.keyboard.press("Escape")
    assert steps(tab) == whole


def test_the_keyboard_reads_and_zooms(visit):
    tab = visit()
    tab.locator(f"{FIRST} svg.chart").focus()
    status = tab.locator("#curves [role=status]")
    tab.keyboard.press("End")
    assert "step 5000:" in status.inner_text()
    tab.keyboard.press("ArrowLeft")
    assert "Training loss, step 49" in status.inner_text()
    assert "layer " in status.inner_text()
    whole = steps(tab)
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    assert min(steps(tab)) > 2000
    tab.keyboard.press("Home")
    assert "step 1:" in status.inner_text()
    assert max(steps(tab)) < 2000  # the view went along
    tab.keyboard.press("-")
    tab.keyboard.press("-")
    assert steps(tab) == whole


def test_a_large_constant_has_few_grid_lines(browser, tmp_path):
    """Neither precision nor a tolerance in proportion to the value may add ticks."""
    made_results.rows(tmp_path, "un")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text(
        "\n".join([lines[0], *(f"{s.rpartition(',')[0]},1e17" for s in lines[1:])]) + "\n"
    )
    path = page.write({tmp_path: made_results.result("un")}, tmp_path / "report.html")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(path.as_uri())
    tab.locator("#statistics input[type=checkbox]").uncheck(timeout=10_000)
    assert 2 <= tab.locator("#statistics .grid").count() <= 6
    tab.close()


def test_the_scale_can_be_linear(visit):
    tab = visit()
    before = tab.locator(f"{FIRST} path.line").first.get_attribute("d")
    tab.locator("#curves input[type=checkbox]").uncheck()
    assert tab.locator(f"{FIRST} path.line").first.get_attribute("d") != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_every_screen_and_a_dark_theme(visit, scheme, width, tmp_path):
    tab = visit(width, scheme, touch=width < 500)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    ground, text = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    light, dark = (sum(int(part) for part in colour[4:-1].split(",")) for colour in (ground, text))
    assert (light > dark) == (scheme == "light")
    for chart in tab.locator("svg.chart").all():
        right = max(
            tab.evaluate(
                "s => [...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().right)", chart.element_handle()
            )
        )
        assert right <= width
    assert len(tab.screenshot(path=tmp_path / "page.png", full_page=True)) > 20_000


def test_the_table_shows_every_column_on_a_desktop(browser, tmp_path):
    made = made_results.demo(tmp_path)
    for one in made.values():
        one["fold"]["foldable"] = "12 of 12"
        one["speed"]["inference_words_per_s"] = 3011.0
        for score in one["scores"].values():
            score |= {"per": 98.2, "per_error": 0.36, "wer": 84.0, "wer_error": 0.82}
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(page.write(made, tmp_path / "report.html").as_uri())
    width, needed = tab.locator(".scroll", has=tab.locator("table.sortable")).evaluate(
        "part => [part.clientWidth, part.scrollWidth]"
    )
    tab.close()
    assert needed <= width, f"the last columns are cut: {needed} pixels in {width}"


def test_a_tap_reads_a_chart_and_then_the_next(visit):
    tab = visit(390, touch=True)
    for place in (1, 2):
        chart = tab.locator("#statistics svg.chart").nth(place)
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        tab.touchscreen.tap(box["x"] + 200, box["y"] + 70)
        tip = tab.locator("#statistics .tip").nth(place)
        tip.wait_for(state="visible")
        tab.wait_for_timeout(50)  # focus follows the tap
        assert "median" in tip.inner_text()
        assert tab.locator("#statistics .tip >> visible=true").count() == 1
        assert abs(tip.bounding_box()["y"] - box["y"]) < 40  # over the chart, not below it
