"""The wheel as a stranger gets it: built, installed into an environment of its own, and run."""

import pathlib
import site
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_installs_and_lists_its_norms(tmp_path):
    """The new environment has nothing but normkit; its dependencies are lent by a path file, to save a download."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("normkit-*.whl")
    home = tmp_path / "a place with spaces"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True
    )
    (packages,) = home.glob("lib/python*/site-packages")
    lent = tmp_path / "lent"
    lent.mkdir()
    for entry in pathlib.Path(site.getsitepackages()[0]).iterdir():
        if "normkit" not in entry.name:  # the checkout's own editable install would answer instead
            (lent / entry.name).symlink_to(entry)
    (packages / "lent.pth").write_text(f"{lent}\n")

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / "normkit"), *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("list")
    for name in ("layer", "power", "un"):
        assert name in out
    where = subprocess.run(
        [str(python), "-c", "import normkit; print(normkit.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert str(packages) in where.stdout
    assert (packages / "normkit" / "py.typed").is_file()
    assert list((packages / "normkit" / "report").rglob("*.j2"))
