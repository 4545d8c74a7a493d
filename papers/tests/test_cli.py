"""The command line: output, files and exit status; errors of one line."""

import dataclasses
import errno
import functools
import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
import safetensors.torch
from normkit_papers.cli import COMMANDS, main
from normkit_papers.data.embedded import SOURCES
from normkit_papers.models.config import Model
from normkit_papers.report import results
from normkit_papers.studies.catalogue import RECIPES
from normkit_papers.train.config import Images, Run
from normkit_papers.train.folder import load
from normkit_papers.train.run import train

import normkit
from normkit.models import convert
from normkit.norms import NORMS, options

ROOT = pathlib.Path(__file__).parents[2]
RUN = Run(
    name="small",
    task="g2p",
    data="cmudict",
    model=Model(width=16, hidden=24, depth=1, heads=2, norm="un(warmup=9)", max_length=64),
    steps=12,
    batch_tokens=200,
    test_items=20,
    threads=1,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder as the demo leaves it, with two runs."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    train(RUN, folder / "un", command="as typed")
    train(dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, norm="layer")), folder / "layer")
    return folder


@pytest.fixture
def typed(capsys):
    """Type a command; its exit status, output and errors."""

    def run(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:  # tyro ends the process when it has helped
            status = ended.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def refused(outcome, *parts):
    """One line of error, exit status 2, nothing printed."""
    status, out, err = outcome
    assert status == 2, err
    assert err.count("\n") == 1, err
    assert out == ""
    for part in parts:
        assert part in err
    return True


def test_overview_names_every_command(typed):
    status, out, _ = typed("--help")
    assert status == 0
    assert all(f"normkit {name}" in out for name in COMMANDS)
    assert typed()[0] == 2
    assert typed("--version")[:2] == (0, f"normkit {normkit.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, typed):
    status, out, err = typed(name, "--help")
    assert status == 0
    assert f"usage: normkit {name}" in out
    assert name == "train" or not re.search(r"None|default: (\)|'')", out), "means nothing to a user"
    assert err == ""
    assert typed("help", name) == (0, out, "")


def test_help_names_positional_arguments_and_values(typed):
    for shown in ("fold [-h] MODEL --out PATH", "figure [-h] [NAME] [PATH ...] [--out PATH]"):
        assert f"usage: normkit {shown}" in typed(shown.split()[0], "--help")[1]
    assert "--statistics {frozen,batches}" in typed("remove-norms", "--help")[1]


def test_help_breaks_lines_at_the_width_of_the_terminal(typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert re.search("Statistics of the new norms .*, else frozen", typed("remove-norms", "--help")[1])
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, typed("calibrate", "--help")[1].splitlines())) <= 60


def test_list_shows_all_tables(typed):
    status, out, _ = typed("list")
    assert status == 0
    for name in NORMS:
        assert f"  {name} " in out
        assert all(f"{key}={value!r}" in out for key, value in options(name).items())
    assert all(f"  {name} " in out for name in [*RECIPES, *SOURCES])


def test_help_of_a_recipe_documents_every_field(typed):
    status, out, _ = typed("train", "g2p_cmudict", "--help")
    assert status == 0
    flags = [field.name for field in dataclasses.fields(Run) if field.name not in ("model", "images")]
    flags += [f"model.{field.name}" for field in dataclasses.fields(Model)]
    flags += [f"images.{field.name}" for field in dataclasses.fields(Images)]
    for flag in flags:
        assert re.search(rf"--{flag.replace('_', '-')}[\s,]", out), f"--{flag} is not in the help"
    assert "(default: 5000)" in out


def test_train_a_recipe_with_other_settings_and_resume(typed, tmp_path):
    settings = [
        "--steps", 6, "--model.width", 8, "--model.depth", 1, "--model.heads", 2, "--model.norm", "un(window=2)",
    ]  # fmt: skip
    settings += ["--checkpoint-every", 3, "--warmup", 1, "--out", tmp_path]
    status, out, _ = typed("train", "vit_digits", *settings)
    assert status == 0
    assert "accuracy" in out
    result = results.read(tmp_path)
    assert result["run"]["model"]["norm"] == "un(window=2)"
    assert result["command"].startswith("normkit train vit_digits --steps 6 --model.width 8")
    assert (tmp_path / "report.html").stat().st_size > 1000
    before = (tmp_path / "model.safetensors").stat()
    status, again, error = typed("train", "vit_digits", *settings, "--resume")
    assert (status, error) == (0, "")
    assert (tmp_path / "table.txt").read_text() in again
    assert (tmp_path / "model.safetensors").stat() == before, "a run that ended is not trained again"
    refusal = typed("train", "vit_digits", *settings, "--lr", "0.01", "--resume")
    assert refused(refusal, "holds a run with another lr (", "not 0.01); resume with its own settings")


def test_a_run_that_diverged_is_a_failure(typed, tmp_path):
    settings = ["--steps", 20, "--lr", 1e30, "--warmup", 0, "--clip", 0, "--schedule", "constant", "--model.width", 8]
    settings += ["--model.depth", 1, "--model.heads", 2, "--out", tmp_path]
    status, _, error = typed("train", "vit_digits", *settings)
    assert status == 1
    assert "diverged at step" in error
    assert "lower --lr" in error


def test_pronounce_takes_a_run_or_the_best_of_the_demo(typed, runs, monkeypatch):
    status, out, _ = typed("pronounce", "hello", "it's", "--run", runs / "layer")
    assert status == 0
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["hello", "it's"]
    symbols = set(load(runs / "layer").vocabularies["target"].symbols)
    assert set(out.split()) - {"hello", "it's"} <= symbols
    monkeypatch.chdir(runs.parent)
    (runs.parent / "runs").mkdir()
    (runs.parent / "runs" / "demo").symlink_to(runs)
    best = min(("layer", "un"), key=lambda name: results.read(runs / name)["scores"]["beam"]["per"])
    status, _, err = typed("pronounce", "Hello")
    assert status == 0
    assert err == f"using runs/demo/{best}\n"


def test_translate_reads_lines(typed, runs, monkeypatch):
    _, out, _ = typed("pronounce", "hello", "world", "--run", runs / "un")
    expected = [line.split(maxsplit=1)[1] if len(line.split()) > 1 else "" for line in out.splitlines()]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\nworld\n")))
    status, out, _ = typed("translate", runs / "un")
    assert status == 0
    assert [line.strip() for line in out.splitlines()] == [expected[0], "", expected[1]]


def test_translate_names_the_line_that_it_cannot_take(typed, runs, monkeypatch):
    ascii_ = {"encoding": "ascii", "errors": "surrogateescape"}  # as Python has it where LC_ALL=C
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hello\nhällo\n".encode()), **ascii_))
    status, out, err = typed("translate", runs / "un")
    assert (status, out.count("\n")) == (2, 1)
    assert "line 2: 'ä'" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hello\nhällo\n".encode("latin1")), **ascii_))
    status, out, err = typed("translate", runs / "un")
    assert (status, out.count("\n")) == (2, 1), "the line before it is translated"
    assert "line 2 of standard input is not UTF-8: invalid continuation byte at byte 1" in err
    assert "iconv" in err


def test_fold_saves_a_run_that_answers_alike(typed, runs, tmp_path):
    status, out, _ = typed("fold", runs / "un", "--out", tmp_path / "folded")
    assert status == 0
    assert "7 of 7 norms fold away" in out
    one = typed("pronounce", "hello", "--run", runs / "un")[1]
    assert typed("pronounce", "hello", "--run", tmp_path / "folded")[1] == one
    status, out, _ = typed("audit", runs / "layer")
    assert status == 0
    assert "0 of 7 norms fold away" in out


def test_audit_and_fold_of_a_hugging_face_folder(typed, tmp_path):
    pytest.importorskip("transformers")
    from third_party_models import case_of

    case_of("bert").model.save_pretrained(tmp_path / "bert")
    status, out, _ = typed("audit", tmp_path / "bert")
    assert status == 0
    assert "0 of 6 norms fold away" in out
    status, out, _ = typed("fold", tmp_path / "bert", "--out", tmp_path / "folded")
    assert status == 0, "gains and biases of LayerNorm move into the layers after it"
    files = {path.name for path in (tmp_path / "folded").iterdir()}
    assert {"config.json", "model.normkit.safetensors"} <= files, "from_pretrained would build the norms of BERT"
    assert refused(typed("fold", tmp_path / "bert", "--out", tmp_path / "bert"), "is the model itself")


def test_a_converted_hugging_face_folder_folds_or_is_refused(typed, tmp_path):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file
    from third_party_models import case_of

    model = convert(case_of("llama").model, "un")
    model.save_pretrained(tmp_path / "saved")
    status, out, _ = typed("fold", tmp_path / "saved", "--out", tmp_path / "folded")
    assert status == 0
    assert "5 of 5 norms fold away" in out
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors["model.norm.running"]
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    for command in (("audit",), ("fold", "--out", tmp_path / "other")):
        named = refused(typed(command[0], tmp_path / "saved", *command[1:]), "1 missing (model.norm.running)")
        assert not (tmp_path / "other").exists(), named


def test_report_writes_table_pictures_and_page(typed, runs, tmp_path):
    status, out, _ = typed("report", runs, "--out", tmp_path)
    assert status == 0
    assert (tmp_path / "table.txt").read_text() in out
    assert {path.name for path in tmp_path.iterdir()} >= {"table.txt", "report.html", "curves.png", "statistics.svg"}


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["dmeo"], ["there is no command named 'dmeo' (did you mean 'demo'?)"]),
        (["train", "vit_digit"], ["there is no recipe named 'vit_digit' (did you mean 'vit_digits'?)"]),
        (["train", "vit_digits", "--stpes", "3"], ["--stpes", "did you mean '--steps'?"]),
        (["train", "vit_digits", "--steps", "many"], ["--steps must be a whole number; got 'many'"]),
        (["train", "vit_digits", "--lr", "x"], ["--lr must be a number; got 'x'"]),
        (["train", "vit_digits", "--seeds", "x"], ["--seeds must be a whole number; got 'x'"]),
        (["train", "vit_digits", "--seeds", "1000000000"], ["seeds must be at least 1 and at most 1,000; got"]),
        (["train", "vit_digits", "--data", "."], ["task digits trains on the data set digits alone; got the folder ."]),
        (["train", "g2p_cmudict", "--data", "digits"], ["cannot train on digits, which is data of task digits; leave"]),
        (["train", "vit_digits", "--steps", "0"], ["steps must be at least 1; got 0"]),
        (["train", "vit_digits", "--model.norm", "laier"], ["no norm named 'laier' (did you mean 'layer'?)"]),
        (["train", "vit_digits", "--model.norm", "un(windw=2)"], ["no option of un named 'windw' (did you mean"]),
        (["train", "vit_digits", "--model.norm", "un(window=0)"], ["whole number from 1 to 65536; got 0"]),
        (["train", "vit_digits", "--steps", "9", "--data", "digit"], ["the data set digits alone; got 'digit'"]),
        (["demo", "--norms", "layer", "laier"], ["no norm named 'laier' (did you mean 'layer'?)"]),
        (["demo", "--norms", "layer", "layer()"], ["'layer()' is given twice"]),
        (["demo", "--norms"], ["no norm given"]),
        (["demo", "--steps", "0"], ["steps must be at least 1; got 0"]),
        (["demo", "--steps", "5", "--minutes", "5"], ["give --steps or --minutes, not both"]),
        (["demo", "--processes", "0"], ["processes must be at least 1; got 0"]),
        (["demo", "--minutes", "-1"], ["minutes must be above 0 and finite; got -1"]),
        (["demo", "--minutes", "nan"], ["minutes must be above 0 and finite; got nan"]),
        (["demo", "--out", ""], ["--out is empty; give a folder"]),
        (["fold", ".", "--out="], ["--out is empty; give a folder"]),
        (["bench", "--shape", "99999999x99999999"], ["--shape 99999999x99999999: 12 such activations do not fit"]),
        (["bench", "--shape", f"{10**22}x4"], ["12 such activations do not fit"]),
        (["report", ".", "--out", "x.html"], ["--out x.html would be a folder, for report.html", "; name x"]),
        (["report", ""], ["an argument is empty; give a word, a file or a folder"]),
        (["train", "vit_digits", "--name", "../x"], ["name must be a relative path without ..,"]),
        (["pronounce"], ["no word given"]),
        (["pronounce", "x", "--run", "nowhere"], ["nowhere is not a run folder: there is no such folder"]),
        (["pronounce", "x"], ["there is no folder runs/demo; train with `normkit demo` first"]),
        (["translate", "."], ["is not a run folder: it has no run.json"]),
        (["fold", ".", "--out", "x"], ["is not a run folder"]),
        (["fold", "."], ["normkit: --out is missing; `normkit fold --help` shows"]),
        (["fold"], ["normkit: MODEL and --out are missing; `"]),
        (["audit", "nowhere"], ["is not a run folder", "a Hugging Face model is a folder here that has a config"]),
        (["audit", sys.executable], ["is not a run folder: it is a file"]),
        (["train", "vit_digits", "--model.arch", "vit"], ["model.arch must be left out for task digits"]),
        (["report"], ["no results given"]),
        (["compare"], ["no run given"]),
        (["figure", "pn.figure9"], ["no figure named 'pn.figure9'"]),
        (["study", "pn.table1", "--show", "--only", "foo"], ["no row of pn.table1 named 'foo'"]),
        (["compare", "nowhere"], ["there is no file or folder nowhere"]),
        (["report", "nowhere"], ["there is no file or folder nowhere"]),
        (["report", "."], ["no result.json in ."]),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, parts, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(typed(*words), *parts)


@pytest.mark.parametrize("words", [["demo"], ["train", "vit_digits"], ["study", "core.cmudict"], ["bench"]])
def test_the_folder_of_results_is_checked_before_training(words, typed, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert refused(typed(*words, "--out", file), f"--out {file} is no folder that can be written to", "name another")


def test_a_full_disk_names_the_file_and_the_remedy(typed, tmp_path, monkeypatch):
    def full(*arguments, file=()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *file)

    kept = "what was written before is kept: free some space, then run this command again"
    monkeypatch.setitem(COMMANDS, "bench", functools.partial(full, file=["table.csv"]))
    assert refused(typed("bench"), f"No space left on device: table.csv; {kept}\n")
    monkeypatch.setattr(os, "fsync", full)
    words = ("train", "vit_digits", "--steps", "2", "--warmup", "1", "--out", tmp_path / "run")
    assert refused(typed(*words), "No space left on device: ", f"run.json; {kept} with --resume")


def test_words_that_the_model_cannot_read(typed, runs):
    assert refused(typed("pronounce", "straße", "--run", runs / "un"), "'ß' in 'straße' is not in the vocabulary")
    assert refused(typed("pronounce", "a" * 70, "--run", runs / "un"), "longer than the model's max_length=64")
    assert refused(typed("pronounce", "", "--run", runs / "un"), "an argument is empty")


def test_folding_over_another_run_or_model_is_refused(typed, runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs / "layer", other)
    kept = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert refused(typed("fold", runs / "un", "--out", other), "a run that was trained", "name another folder")
    for name, holds in (("vocab.json", "files of something else"), ("progress.json", "a run"), ("removal.json", "a ")):
        (tmp_path / name).write_text("{}")
        assert refused(typed("fold", runs / "un", "--out", tmp_path), f"holds {holds}", "name another folder")
        (tmp_path / name).unlink()
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == kept


def test_a_warm_up_that_never_ends_is_reported(typed, tmp_path):
    sizes = ["--model.width", 16, "--model.hidden", 16, "--model.heads", 2, "--model.depth", 1]
    _, _, err = typed("train", "vit_digits", "--steps", 3, *sizes, "--out", tmp_path / "run")
    assert "warm-up of 150 steps does not end within 3; --warmup 0 trains without one" in " ".join(err.split())


def test_folding_a_run_onto_itself_is_refused(typed, runs):
    before = (runs / "un" / "model.safetensors").read_bytes()
    assert refused(typed("fold", runs / "un", "--out", runs / "un"), "is the model itself")
    assert (runs / "un" / "model.safetensors").read_bytes() == before


def test_calibrate_command_changes_statistics_only(typed, runs, tmp_path):
    status, out, _ = typed("calibrate", runs / "un", "--out", tmp_path / "calibrated", "--batches", 3)
    assert status == 0
    assert re.match(r"calibrated 7 norms on 3 training batches; validation loss [\d.]+ before, [\d.]+ after\n", out)
    before, after = load(runs / "un"), load(tmp_path / "calibrated")
    assert after.run == before.run
    changed = {
        name for name, tensor in before.model.state_dict().items() if not tensor.equal(after.model.state_dict()[name])
    }
    assert len(changed) == 7
    assert all(name.endswith("running") for name in changed)
    assert typed("fold", tmp_path / "calibrated", "--out", tmp_path / "folded")[0] == 0
    layer = typed("calibrate", runs / "layer", "--out", tmp_path / "layer")
    assert refused(layer, "has no norm with batch statistics")
    assert refused(typed("calibrate", runs / "un", "--out", runs / "layer"), "calibration would overwrite")


def test_damaged_files_of_a_run(typed, runs, tmp_path):
    for name in ("run.json", "vocab.json", "model.safetensors"):
        (tmp_path / name).write_bytes((runs / "un" / name).read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refused(typed("pronounce", "x", "--run", tmp_path), "is cut short or not a safetensors file")
    settings = json.loads((tmp_path / "run.json").read_text())
    settings["model"]["hidden"] = 32
    (tmp_path / "run.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert refused(typed("pronounce", "x", "--run", tmp_path), "is of another model: it has", "of shape")
    (tmp_path / "result.json").write_text('{"schema": 1')
    assert refused(typed("report", tmp_path), "is cut short or not JSON")


def test_a_package_that_is_missing_is_named_with_its_extra(typed, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert refused(typed("demo", "--help"), "tyro", "pip install 'normkit[demo]'")
    assert typed("--help")[0] == typed("list")[0] == 0, "these need torch alone"


def test_the_module_runs_as_the_script_does():
    done = subprocess.run(
        [sys.executable, "-m", "normkit_papers.cli", "lsit"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("normkit: there is no command named 'lsit' (did you mean 'list'?)")


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="background processes ignore Ctrl-C")
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    code = "import sys, normkit_command; sys.exit(normkit_command.main())"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "normkit: interrupted\n")


@pytest.mark.parametrize("damage", [math.nan, math.inf, -1.0])
def test_damaged_weights_and_statistics_are_refused(damage, typed, runs, tmp_path):
    for name in ("run.json", "vocab.json"):
        (tmp_path / name).write_bytes((runs / "un" / name).read_bytes())
    tensors = safetensors.torch.load_file(runs / "un" / "model.safetensors")
    running = next(name for name in tensors if name.endswith("running"))
    tensors[running].fill_(damage)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert refused(typed("pronounce", "x", "--run", tmp_path), "model.safetensors is damaged", "not finite or negative")


def test_control_characters_in_vocabularies_are_escaped(typed, runs, tmp_path):
    for name in ("run.json", "model.safetensors", "vocab.json"):
        (tmp_path / name).write_bytes((runs / "un" / name).read_bytes())
    vocabularies = json.loads((tmp_path / "vocab.json").read_text())
    vocabularies["target"] = [f"{symbol}\x1b[31m" for symbol in vocabularies["target"]]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabularies))
    outcome = typed("pronounce", "hello", "--run", tmp_path)
    assert "\x1b" not in outcome[1] + outcome[2]


def test_list_shows_which_recipes_run_here(typed, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    shown = typed("list")[1].splitlines()
    lines = [line.split(maxsplit=1) for line in shown if line.startswith("  ")]
    found = {words[0]: words[1] for words in lines if len(words) == 2}
    assert found["g2p_cmudict"].startswith("runs here")
    assert found["mt_multi30k"].startswith("no data here")
    starts = {line.index(found[name]) for name in RECIPES for line in shown if line.split()[:1] == [name]}
    assert len(starts) == 1, "columns are aligned"
