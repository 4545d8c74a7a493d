"""Result files: complete, validated when read, and safe against a full disk."""

import errno
import json
import math
import os
import re

import pytest
from made_results import result
from normkit_papers.report import page, plot, results


def test_a_result_comes_back_as_it_was_written(tmp_path):
    made = result("un(window=8)", 12.3)
    made["curve"][3]["train_loss"] = math.inf
    path = results.write(tmp_path / "a" / "b", made)
    assert results.read(path) == made == results.read(path.parent)
    assert results.find([tmp_path, path]) == {path.parent: made}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps(result())[:500], "cut short"),
        ("", "leave this run out, or train it again"),
        ("[" * 100_000, "cut short"),
        ("\xff\xfe", "cut short"),
        ("9" * 5000, "cut short"),
        ("[1, 2]", "it must be a JSON object, found list"),
        ('{"weights": [1, 2]}', "it has no schema"),
        (json.dumps(result() | {"schema": 2}), "has schema 2"),
    ],
)
def test_an_invalid_result_is_rejected_by_name(tmp_path, text, why):
    (tmp_path / "result.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        results.find([tmp_path])
    assert str(tmp_path / "result.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("scores", "running"), "good", "scores.running must be a JSON object, found str"),
        (("scores", "running", "per"), "9.9", "scores.running.per must be a number, found str"),
        (("curve", 2, "step"), 1.5, "curve[2].step must be a whole number, found float"),
        (("run", "model", "norm"), None, "run.model.norm must be text, found NoneType"),
        (("parameters",), True, "parameters must be a whole number, found bool"),
        (("parameters",), 10**400, "parameters is too large a number"),
        (("timing",), {"pairs": [{"a": "x"}]}, "it has no timing.pairs[0].b"),
        (("fold", "rows"), {}, "fold.rows must be a list, found dict"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, place, value, why):
    made = result()
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=re.escape(why)):
        results.read(results.write(tmp_path, made))


@pytest.mark.parametrize("name", [name for name, kind in results.SHAPE.items() if not isinstance(kind, results.Maybe)])
def test_a_missing_field_is_named(tmp_path, name):
    made = result()
    del made[name]
    with pytest.raises(ValueError, match=f"it has no {name}"):
        results.read(results.write(tmp_path, made))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"result\.json is missing"):
        results.read(tmp_path)
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        results.find([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=re.escape(f"no result.json in {tmp_path}")):
        results.find([tmp_path])


def test_a_reader_during_a_write_gets_the_whole_old_file(tmp_path):
    path = results.write(tmp_path, result(seed=1))
    with path.open() as old:
        results.write(tmp_path, result(seed=2))
        assert json.load(old)["run"]["seed"] == 1
    assert results.read(path)["run"]["seed"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    old = result()
    results.write(tmp_path, old)
    (tmp_path / "report.html").write_text("old page")
    (tmp_path / "curves.svg").write_text("old picture")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    new = {tmp_path: result("un", 11.0)}
    for save in (
        lambda: results.write(tmp_path, new[tmp_path]),
        lambda: page.write(new, tmp_path / "report.html"),
        lambda: plot.curves(new, tmp_path / "curves.svg"),
    ):
        with pytest.raises(OSError, match="No space left"):
            save()
    assert results.read(tmp_path) == old
    assert (tmp_path / "report.html").read_text() == "old page"
    assert (tmp_path / "curves.svg").read_text() == "old picture"
    assert len(list(tmp_path.iterdir())) == 3
