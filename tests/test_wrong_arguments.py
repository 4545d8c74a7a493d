"""Errors for wrong arguments name the argument; models and files stay as they were."""

import resource
import signal
from functools import partial

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import watch

X = torch.randn(4, 5, 8)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).eval()


def un() -> nn.Sequential:
    return nk.convert(layers(), "un")


ROWS = r"a recording consists of rows, as normkit\.record gives them; got"
CASES = {  # message of the error: call
    "forward must be a function or None; got 3": lambda: nk.calibrate(un(), [X], forward=3),
    "on_progress must be a function or None; got 'x'": lambda: nk.calibrate(un(), [X], on_progress="x"),
    "UN takes a tensor .* not int. The batch was given as": lambda: nk.calibrate(un(), [3]),
    "tokens were padding or missing": lambda: nk.calibrate(un(), [X[:0]]),
    r"calibrate\(\) got one model twice": lambda: nk.calibrate(model := un(), [X], like=model),
    "takes the model that was converted as `like`; 0 differs": lambda: nk.calibrate(
        un(), [X], like=nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    ),
    r"calibrate\(\) takes an nn\.Module; got str": lambda: nk.calibrate(un(), [X], like="model"),
    "outputs must be a function or None; got 'y'": lambda: nk.fold(un(), X, outputs="y"),
    r"outputs must be a function or None; got \[\]": lambda: nk.audit(un(), X, outputs=[]),
    "outputs must be a function or None; got {}": lambda: nk.to_rms(layers(), X, outputs={}),
    "cannot verify anything on an empty or meta example": lambda: nk.fold(un(), X.to("meta")),
    "inplace must be True or False; got 'x'": lambda: nk.convert(layers(), "un", inplace="x"),
    "inplace must be True or False; got 1": lambda: nk.calibrate(un(), [X], inplace=1),
    "untie must be True or False; got 'no'": lambda: nk.fold(un(), X, untie="no"),
    "untie must be True or False; got None": lambda: nk.to_rms(layers(), X, untie=None),
    "other_shapes must be True or False; got 'no'": lambda: nk.audit(un(), X, other_shapes="no"),
    "fuse_attention must be True or False; got 0": lambda: nk.export(layers().eval(), "m.onnx", X, fuse_attention=0),
    "folder must be a folder that exists, that of a run; got 'nowhere'": lambda: watch.read_run("nowhere"),
    r"scale_loss\(\) takes an nn\.Module; got NoneType": lambda: nk.scale_loss(None).__enter__(),
    "init must be a number above 0 or None; got -1": lambda: nk.fix_embedding(nn.Embedding(3, 4), init=-1),
    "eps must be a number of at least 0; got 'x'": lambda: nk.norms.FixNorm("x"),
    "a norm is chosen by its name, a string; got None": lambda: nk.options(None),
    "folder must be a path, a string or pathlib.Path; got None": lambda: nk.load_pretrained(None),
    "path must be a path, .* got 3": lambda: watch.read(3),
    "folder must be a path, .* got 3": lambda: watch.read_run(3),
    "to must be a path, .* got 3": lambda: watch.Rows(to=3),
    "to must be a path, a string or pathlib.Path; got 4": lambda: watch.Recorder(layers(), to=4),
    "keep must be a whole number of at least 1; got None": lambda: watch.Recorder(layers(), keep=None),
    "alpha must be a number of at least 0 and below 1; got 'x'": lambda: watch.Recorder(layers(), alpha="x"),
    r"quantities must be names of quantities, default or all; got \[\]": lambda: watch.Recorder(
        layers(), quantities=[]
    ),
    "quantities must be names of quantities, default or all; got 3": lambda: watch.Recorder(layers(), quantities=3),
    f"{ROWS} NoneType": lambda: watch.Recording(None),
    f"{ROWS} int": lambda: nk.diagnose(3),
    "loss must be a module, a function without arguments, or None; got 3": lambda: watch.Recorder(layers(), loss=3),
}


@pytest.mark.parametrize("message", CASES)
def test_the_error_names_the_argument(message):
    with pytest.raises((TypeError, ValueError), match=message):
        CASES[message]()


def test_export_checks_its_arguments_before_it_writes(tmp_path):
    model, path = layers(), tmp_path / "m.pt2"
    (tmp_path / "folder.pt2").mkdir()
    export = partial(nk.export, model)
    for message, call in {
        "path must be a path, a string or pathlib.Path; got 3": lambda: export(3, X),
        "folder.pt2 is a folder; name a file": lambda: export(tmp_path / "folder.pt2", X),
        "tolerance must be a number of at least 0; got nan": lambda: export(path, X, tolerance=float("nan")),
        "outputs must be a function or None; got {}": lambda: export(path, X, outputs={}),
        "dynamic must be True or False; got 'x'": lambda: export(path, X, dynamic="x"),
        "found no tensor in what outputs= picks": lambda: export(path, X, outputs=lambda out: None),
        "no number of the model output is finite": lambda: export(path, X * float("nan")),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert [file.name for file in tmp_path.iterdir()] == ["folder.pt2"]


def test_rows_are_checked_before_a_file_changes(tmp_path):
    watch.write(path := tmp_path / "rows.csv", [row := watch.Row(1, "norm", "un", "rms", 1.0)])
    for wrong in ([(1, "norm", "un", "rms", 1.0)], "ab", None, [row, 3]):
        with pytest.raises(TypeError, match=ROWS):
            watch.write(path, wrong)
    assert watch.read(path) == [row]


def test_a_full_disk_ends_an_export_with_an_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            nk.export(layers(), tmp_path / "m.pt2", X)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())
