"""The folder into which C++ kernels are compiled."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from normkit.kernels import build


def test_a_user_without_a_home_gets_a_warning_and_slower_code(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NORMKIT_CACHE", raising=False)
    monkeypatch.setattr(build.Path, "home", home)
    with pytest.warns(RuntimeWarning, match="set HOME, or NORMKIT_CACHE"):
        found, why = build._built("kernels", ["g++"], [], str)
    assert found is None
    assert "no home folder" in why


def test_without_a_cache_all_processes_use_one_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    kept = tmp_path.resolve() / f"normkit-{build.os.getuid()}"
    assert [build._private(tmp_path / "file" / "native") for _ in range(2)] == [kept, kept]
    kept.chmod(0o777)
    assert build._private(tmp_path / "file" / "native") != kept


def test_copies_of_the_sources_share_what_was_compiled(tmp_path, monkeypatch):
    def key():
        return build._key(["g++"], ["-O3", str(build.SOURCES / "kernels.cpp")])

    original = key()
    shutil.copytree(build.SOURCES.parent, tmp_path / "kernels")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "kernels" / "cpu")
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
        found = list(pool.map(lambda _: build._built("kernels", ["g++"], [], str), range(4)))
    assert found == [(str(compiled[0]), "")] * 4
    assert len(compiled) == 1


def test_a_library_survives_a_power_cut_whole(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("normkit._util.os.fsync", lambda file: synced.append(build.os.fstat(file).st_size))
    build._compile(["sh", "-c", 'echo library > "$2"', "sh"], tmp_path / "kernels.so")  # in place of a compiler
    assert synced[0] == len("library\n")
    assert (tmp_path / "kernels.so").read_text() == "library\n"
