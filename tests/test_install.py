"""The wheel as a stranger gets it: built, installed into an environment of its own, and run there.

Such an environment has nothing but normkit. So that no test downloads torch, the distributions that the wheel asks
for, and theirs in turn, are lent to it by symbolic links into this environment: those and no others, so what the wheel
forgets to ask for is missing there, as it would be for a stranger.
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def asked_for(name: str, extras: tuple[str, ...] = ()) -> set[tuple[str, tuple[str, ...]]]:
    """The distributions, with their extras, that a distribution needs, and those that they need."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    waiting = [(name, extras)]
    while waiting:
        entry = waiting.pop()
        if entry in found:
            continue
        found.add(entry)
        for line in importlib.metadata.requires(entry[0]) or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *entry[1])):
                waiting.append((need.name, tuple(sorted(need.extras))))
    return found


class Home:
    """An environment with the wheel in it, and what the wheel asks for with `extras`."""

    def __init__(self, folder: pathlib.Path, wheel: pathlib.Path, extras: tuple[str, ...] = ()):
        folder.mkdir()
        self.folder = folder
        self.bin = folder / "a place with spaces" / "bin"
        venv.create(self.bin.parent, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
        (self.packages,) = self.bin.parent.glob("lib/python*/site-packages")
        lent = folder / "lent"
        lent.mkdir()
        for name in {name for name, _ in asked_for("normkit", extras)} - {"normkit"}:
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (lent / top).is_symlink():
                    (lent / top).symlink_to(pathlib.Path(str(distribution.locate_file(top))))
        (self.packages / "lent.pth").write_text(f"{lent}\n")

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess:
        """Run a program of the environment; that torch finds no NumPy is its own warning, not ours."""
        command, quiet = [str(self.bin / program), *words], {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=quiet, timeout=120
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, timeout=300)
    (path,) = folder.glob("normkit-*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"normkit"}
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "normkit").rglob("*") if path.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)


def test_torch_alone_is_enough_to_import_and_to_list(wheel, tmp_path):
    home = Home(tmp_path / "core", wheel)
    where = home.run("python", "-c", "import normkit; print(normkit.__file__, normkit.make('un', 8).spec)")
    assert where.returncode == 0, where.stderr
    assert where.stdout.startswith(str(home.packages))
    listed = home.run("normkit", "list")
    assert listed.returncode == 0, listed.stderr
    for name in ("layer", "power", "un", "g2p_cmudict"):
        assert name in listed.stdout


def test_what_is_missing_is_said_in_one_line(wheel, tmp_path):
    home = Home(tmp_path / "core", wheel)
    done = home.run("normkit", "train", "g2p_cmudict")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'normkit[demo]'" in done.stderr


def test_the_extra_demo_brings_all_that_the_package_imports(wheel, tmp_path):
    home = Home(tmp_path / "demo", wheel, ("demo",))
    code = (
        "import importlib, pkgutil, normkit\n"
        "for module in pkgutil.walk_packages(normkit.__path__, 'normkit.', onerror=lambda name: None):\n"
        "    if 'triton' not in module.name:  # comes with torch where there is a GPU for it\n"
        "        importlib.import_module(module.name)\n"
        "print(normkit.__file__)"
    )
    done = home.run("python", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(home.packages))
    done = home.run("normkit", "demo", "--norms", "laier")
    assert done.returncode == 2
    assert "layer" in done.stderr
