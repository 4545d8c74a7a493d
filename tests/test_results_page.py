"""docs/results.md agrees with the files in results/."""

import functools
import importlib.util
import json
import pathlib

import pytest
from test_study import ONE, put

from normkit.lab.report import results
from normkit.lab.studies import table
from normkit.lab.study import expand

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "scripts" / "results_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_agrees_with_the_files(script):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    assert page == script.page(ROOT / "results"), "run python scripts/results_page.py"


def test_results_page_names_origin_of_every_run():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    for path in (ROOT / "results").rglob(results.FILE):
        found = results.read(path)
        assert found["command"] in page, path
        assert found["where"]["commit"][:9] in page, path
        assert found["where"]["device"] in page, path


def test_kept_tables_match_their_results():
    """No figure in a kept table that its run's own file does not have.

    Those of rows.csv, which is not kept, aside.
    """
    read = functools.cache(results.read)  # tables share runs
    for path in (ROOT / "results" / "studies").glob("*/tables/*.json"):
        made = json.loads(path.read_text(encoding="utf8"))
        assert path.with_suffix(".txt").read_text(encoding="utf8") == table.text(made)
        for row in made["rows"]:
            for cell in row["cells"]:
                for run in cell["runs"]:
                    if run["status"].startswith("failed") or run["seed"] is None:  # measured by a script
                        continue
                    found = read(ROOT / "results" / "studies" / run["folder"])
                    assert found["status"] == run["status"]
                    assert (found["where"]["commit"], found["run"]["seed"]) == (run["commit"], run["seed"])


def test_what_a_study_measured_is_kept_and_shown(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "STUDIES", {"one": ONE})
    out, kept = tmp_path / "runs", tmp_path / "results"
    layer, un = expand(ONE, "pocket")
    for seed in range(2):
        put(layer, out, seed, command="normkit study one --seeds 2", scores={"running": {"accuracy": 90.0 + seed}})
    put(un, out, 0, status="diverged at step 3", scores={}, command="normkit study one")
    table.write(table.collect(ONE, "pocket", out), out)
    script.keep(out, kept)
    assert len(list(kept.rglob(results.FILE))) == 3
    page = script.page(kept)
    assert "## one, pocket" in page
    assert "| LN | 90.5 ± 0.7 (2) |" in page
    assert "| UN | diverged at step 3 |" in page
    assert "| LN | 2 | 0, 1 | a processor, threads: 1 | `012345678` |" in page
    assert "`normkit study one --seeds 2` |" in page
    with pytest.raises(SystemExit, match="holds no tables"):
        script.keep(tmp_path / "nothing", kept)


def test_a_study_with_shared_runs_has_a_remark(script, tmp_path, monkeypatch):
    """Kept runs that fill cells of a study without a table of its own.

    What only failed fills none.
    """
    layer, un = expand(ONE, "pocket")
    put(layer, tmp_path / "studies", 0, scores={"running": {"accuracy": 90.0}})
    put(un, tmp_path / "studies", 0, status="diverged at step 3", scores={})
    monkeypatch.setattr(script, "STUDIES", {"one": ONE})
    cells = sum(cell["ours"] for row in table.collect(ONE, "pocket", tmp_path)["rows"] for cell in row["cells"])
    assert f"| pocket, partly, by runs of other studies: 1 of {cells} cells |" in script.page(tmp_path)
    table.write(table.collect(ONE, "pocket", tmp_path / "studies"), tmp_path / "studies")
    assert "| pocket |" in script.page(tmp_path)
    assert "partly" not in script.page(tmp_path)
