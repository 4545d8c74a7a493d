"""Compilation of the C++ kernels, by a script in place of a compiler; the folder that they go to."""

import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import normkit
from normkit.kernels import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Return a function that sets what the compiler does; nothing is compiled or loaded yet."""
    loaded, script = [], tmp_path / "a compiler"

    def does(body):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", f"'{script}' -v")
        build._load.cache_clear()
        return loaded

    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    yield does
    build._load.cache_clear()


WRITES = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


def test_a_library_is_made_once_where_others_cannot_write(compiler, tmp_path):
    loaded, folder = compiler(WRITES), tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build.is_loaded()
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    for _ in range(2):
        build._load.cache_clear()
        assert build.is_loaded()
    assert loaded[1:] == [str(path) for path in folder.glob("*.so")] * 2
    compiler("exit 1")
    assert build.is_loaded(), "it is compiled already"


@pytest.mark.parametrize("spec", ["batch", "rms", "power(groups=2)"])
def test_without_a_compiler_plain_operations_run(spec, compiler, monkeypatch):
    compiler("exit 1")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "g++" in build.obstacle()
    with normkit.kernels("auto") as ran:
        normkit.make(spec, 4)(torch.randn(8, 4))
    assert ran
    assert all(name.startswith("aten") for name in ran)
    with pytest.raises(RuntimeError, match="native"), normkit.kernels("native"):
        pass


def test_a_compiler_that_fails_is_quoted(compiler, tmp_path):
    loaded = compiler("echo 'no such flag: -O3' >&2; exit 1")
    with pytest.warns(RuntimeWarning, match="-O3"):
        assert not build.is_loaded()
    assert loaded == []
    assert {path.suffix for path in (tmp_path / "cache" / "native").iterdir()} == {".lock"}


def test_a_user_without_a_home_gets_a_warning_and_slower_code(compiler, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    compiler(WRITES)
    monkeypatch.delenv("NORMKIT_CACHE")
    monkeypatch.setattr(build.Path, "home", home)
    with pytest.warns(RuntimeWarning, match="NORMKIT_CACHE"):
        assert not build.is_loaded()
    assert "no home folder" in build.obstacle()


def test_without_a_cache_all_processes_use_one_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    kept = tmp_path.resolve() / f"normkit-{build.os.getuid()}"
    assert [build._private(tmp_path / "file" / "native") for _ in range(2)] == [kept, kept]
    kept.chmod(0o777)
    assert build._private(tmp_path / "file" / "native") != kept


def test_copies_of_the_sources_share_what_was_compiled(tmp_path, monkeypatch):
    def key():
        return build._key(["g++"], ["-O3", str(build.SOURCES / "cpu" / "library.cpp")])

    original = key()
    shutil.copytree(build.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "kernels")
    assert key() == original
    (tmp_path / "kernels" / "triton" / "launches.h").write_text("// changed")
    assert key() != original


def test_processes_that_start_together_compile_once(tmp_path, monkeypatch):
    compiled = []

    def slowly(command, path):
        time.sleep(0.2)
        compiled.append(path)
        path.touch()

    monkeypatch.setattr(build, "_compile", slowly)
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:  # locks of threads that open a file each are as those of processes
        found = list(pool.map(lambda _: build._compiled(["g++"], []), range(4)))
    assert found == compiled * 4
    assert len(compiled) == 1


def test_a_library_survives_a_power_cut_whole(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("normkit._util.os.fsync", lambda file: synced.append(build.os.fstat(file).st_size))
    build._compile(["sh", "-c", 'echo library > "$2"', "sh"], tmp_path / "kernels.so")  # in place of a compiler
    assert synced[0] == len("library\n")
    assert (tmp_path / "kernels.so").read_text() == "library\n"
