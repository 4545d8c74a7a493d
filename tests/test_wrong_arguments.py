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


CASES = [  # name of the argument in the error, call
    ("forward", lambda: nk.calibrate(un(), [X], forward=3)),
    ("on_progress", lambda: nk.calibrate(un(), [X], on_progress="x")),
    ("UN", lambda: nk.calibrate(un(), [3])),
    ("padding", lambda: nk.calibrate(un(), [X[:0]])),
    ("model", lambda: nk.calibrate(model := un(), [X], like=model)),
    ("like", lambda: nk.calibrate(un(), [X], like=nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)))),
    ("Module", lambda: nk.calibrate(un(), [X], like="model")),
    ("outputs", lambda: nk.fold(un(), X, outputs="y")),
    ("outputs", lambda: nk.audit(un(), X, outputs=[])),
    ("outputs", lambda: nk.to_rms(layers(), X, outputs={})),
    ("example", lambda: nk.fold(un(), X.to("meta"))),
    ("inplace", lambda: nk.convert(layers(), "un", inplace="x")),
    ("inplace", lambda: nk.calibrate(un(), [X], inplace=1)),
    ("untie", lambda: nk.fold(un(), X, untie="no")),
    ("untie", lambda: nk.to_rms(layers(), X, untie=None)),
    ("other_shapes", lambda: nk.audit(un(), X, other_shapes="no")),
    ("folder", lambda: watch.read_run("nowhere")),
    ("scale_loss", lambda: nk.scale_loss(None).__enter__()),
    ("init", lambda: nk.fix_embedding(nn.Embedding(3, 4), init=-1)),
    ("eps", lambda: nk.norms.FixNorm("x")),
    ("norm", lambda: nk.options(None)),
    ("folder", lambda: nk.load_pretrained(None)),
    ("path", lambda: watch.read(3)),
    ("folder", lambda: watch.read_run(3)),
    ("to", lambda: watch.Rows(to=3)),
    ("to", lambda: watch.Recorder(layers(), to=4)),
    ("keep", lambda: watch.Recorder(layers(), keep=None)),
    ("alpha", lambda: watch.Recorder(layers(), alpha="x")),
    ("quantities", lambda: watch.Recorder(layers(), quantities=[])),
    ("quantities", lambda: watch.Recorder(layers(), quantities=3)),
    ("rows", lambda: watch.Recording(None)),
    ("rows", lambda: nk.diagnose(3)),
    ("loss", lambda: watch.Recorder(layers(), loss=3)),
]


@pytest.mark.parametrize(("argument", "call"), CASES, ids=[argument for argument, _ in CASES])
def test_the_error_names_the_argument(argument, call):
    with pytest.raises((TypeError, ValueError), match=argument):
        call()


def test_export_checks_its_arguments_before_it_writes(tmp_path):
    model, path = layers(), tmp_path / "m.pt2"
    (tmp_path / "folder.pt2").mkdir()
    export = partial(nk.export, model)
    for argument, call in [
        ("path", lambda: export(3, X)),
        ("folder.pt2", lambda: export(tmp_path / "folder.pt2", X)),
        ("tolerance", lambda: export(path, X, tolerance=float("nan"))),
        ("outputs", lambda: export(path, X, outputs={})),
        ("dynamic", lambda: export(path, X, dynamic="x")),
        ("outputs", lambda: export(path, X, outputs=lambda out: None)),
        ("finite", lambda: export(path, X * float("nan"))),
    ]:
        with pytest.raises((TypeError, ValueError), match=argument):
            call()
    assert [file.name for file in tmp_path.iterdir()] == ["folder.pt2"]


def test_rows_are_checked_before_a_file_changes(tmp_path):
    watch.write(path := tmp_path / "rows.csv", [row := watch.Row(1, "norm", "un", "rms", 1.0)])
    for wrong in ([(1, "norm", "un", "rms", 1.0)], "ab", None, [row, 3]):
        with pytest.raises(TypeError, match="rows"):
            watch.write(path, wrong)
    assert watch.read(path) == [row]


def test_a_full_disk_ends_an_export_with_an_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="large"):
            nk.export(layers(), tmp_path / "m.pt2", X)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())
