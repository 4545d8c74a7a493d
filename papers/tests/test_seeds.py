"""Means over seeds in tables, conclusions and pages, and their intervals."""

import copy
import math
import warnings
from pathlib import Path

import pytest
from made_results import result
from normkit_papers.report import page, summary
from normkit_papers.report.compare import compared
from normkit_papers.report.results import write as write_result
from normkit_papers.report.seeds import difference, interval, pool
from normkit_papers.studies import table


def seeds(norm, *scores):
    return [result(norm, per, seed=seed) for seed, per in enumerate(scores)]


def test_seeds_of_a_norm_are_not_competitors():
    """One row a norm with the mean and its 95 % interval, and conclusions about norms."""
    made = dict(
        enumerate([*seeds("layer", 10.0, 10.2, 10.4), *seeds("un", 10.1, 10.3, 10.5), *seeds("pnv", 13.0, 13.1)])
    )
    text = summary.text(made)
    assert (
        "Best with running statistics is layer, PER 10.2 \u00b1 0.5; within the intervals: un 10.3 \u00b1 0.5;" in text
    )
    assert "behind: pnv" in text
    assert "seed=" not in text.split("Best with")[1]
    assert "means over 2-3 seeds with 95 % intervals" in " ".join(text.split())
    assert text.startswith(summary.MEANS)
    means, each = text.split("each run:")
    assert " ".join(next(line for line in means.splitlines() if line.startswith("layer")).split()).startswith(
        "layer 3 381,547 0.755 10.2 \u00b10.5 9.8 \u00b10.5"
    )
    assert "layer, seed=2" in each
    assert "layer, seed=0" in summary.text(dict(enumerate(seeds("layer", 10.0, 10.2)))).split("each run:")[1]


def test_a_copy_of_a_run_is_no_further_seed(tmp_path):
    seeds = [result("un", seed=seed) for seed in (0, 1)]
    pooled = pool(dict(enumerate([*seeds, copy.deepcopy(seeds[0])])))
    assert [(folder, row.get("seeds", 1)) for folder, row in pooled.items()] == [(0, 2), (2, 1)]
    for name in ("run", "copy"):
        write_result(tmp_path / name, seeds[0])
    with pytest.raises(ValueError, match=r"copy and .*run are runs of the same seed, 0; needs one of each seed"):
        compared([tmp_path])


def test_runs_of_different_data_are_not_compared(tmp_path):
    for name, data in (("a", "cmudict"), ("b", "elsewhere/mine")):
        write_result(tmp_path / name, result("un", data=data))
    with pytest.raises(ValueError, match="runs of g2p on cmudict and g2p on mine; compare runs of one task and data"):
        compared([tmp_path / "a", tmp_path / "b"])


def test_a_seed_that_diverged_is_counted():
    made = dict(
        enumerate([*seeds("un", 10.0, 10.2), result("un", status="diverged at step 7", seed=2), result("layer")])
    )
    text = " ".join(summary.text(made).split())
    assert "un: 2 of 3 done; diverged at step 7." in text
    assert "un 10.1 \u00b1 1.3" in text


def test_the_page_has_means_over_seeds(tmp_path):
    made = {tmp_path / str(i): one for i, one in enumerate([*seeds("layer", 10.0, 10.2), *seeds("un", 12.1, 12.3)])}
    text = page.write(made, tmp_path / "report.html").read_text(encoding="utf8")
    assert "means over seeds: g2p on cmudict" in text
    assert "Best with running statistics is layer, PER 10.1 \u00b1 1.3" in text
    assert "layer, seed=1" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_has_no_interval(bad):
    """A loss that overflowed at evaluation, in one seed of a run that ended as planned."""
    assert not math.isfinite(interval([bad, 1.0])[1])
    assert difference([bad, 1.0], [1.0, 2.0]).endswith("a score is not finite")
    made = seeds("un", 10.0, 10.2)
    made[1]["scores"]["running"]["loss"] = bad
    assert f"un 2 381,547 {bad} 10.1 \u00b11.3" in " ".join(summary.text(dict(enumerate(made))).split())
    assert table._summary([{"value": bad}, {"value": 1.0}])["spread"] is None


def test_equal_scores_of_one_norm_can_be_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert difference([1.0, 1.0], [1.0, 2.0]) == "-0.50 (95 % interval -6.85 to 5.85): not distinguishable"
        assert difference([1.0, 1.0], [2.0, 2.0]) == "-1.00, the same in all seeds"


def test_means_are_over_the_same_seeds():
    """Only one of the seeds was folded: its score is no counterpart of the mean of all."""
    made = seeds("un", 10.0, 12.0, 14.0)
    made[0]["scores"]["folded"] = made[0]["scores"]["running"]
    made[0]["fold"] |= {"foldable": "2 of 2", "max_error": 1e-14}
    text = " ".join(summary.text(dict(enumerate(made))).split())
    assert "before" not in text
    assert "outputs differ by at most 1e-14." in text


def test_statistics_that_were_not_scored_are_not_the_running_ones():
    """Earlier versions scored the statistics of each test batch in place of donors."""
    old, new = result("batch", 12.0), result("un", 11.0, statistics=(10.0, 10.0))
    old["scores"] |= {"batch": result(per=9.0)["scores"]["running"]}
    shown = {row["norm"].text: row for row in summary.rows({1: old, 2: new, 3: result("layer")})}
    assert [shown[norm]["PER donors"].text for norm in ("batch", "un", "layer")] == ["-", "10.0", "="]
    assert [shown[norm]["PER own"].text for norm in ("batch", "un", "layer")] == ["9.0", "-", "="]


def test_fields_without_a_value_are_left_out():
    """They may be null in a result file."""
    made = result("un")
    made["fold"] = {"foldable": None, "max_error": 1e-14, "rows": [{"name": "a", "action": "kept", "why": None}]}
    assert "None" not in summary.text({1: made})
    assert ">None<" not in page.page({Path("un"): made}, "title").decode()
    made["run"]["model"]["norm"] = f"un({'-' * 5000}1)"  # too deep for Python's parser
    assert summary.text({1: made})
