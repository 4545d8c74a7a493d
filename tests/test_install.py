"""The release: sdist and wheel are built, installed into a clean environment.

The environment holds only declared dependencies.

The environment holds normkit and links to the distributions that the wheel requires, directly or indirectly, so that no
test downloads torch. An undeclared dependency is therefore missing there, as it would be for a user.
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

import normkit

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def requirements(name: str, extras: tuple[str, ...] = ()) -> set[tuple[str, tuple[str, ...]]]:
    """Return the distributions that a distribution requires, directly or indirectly.

    Extras are included.
    """
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


class Environment:
    """A clean environment with the wheel and the distributions that it requires with `extras`."""

    def __init__(self, folder: pathlib.Path, wheel: pathlib.Path, extras: tuple[str, ...] = ()):
        folder.mkdir()
        self.folder = folder
        self.bin = folder / "a place with spaces" / "bin"
        venv.create(self.bin.parent, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
        (self.packages,) = self.bin.parent.glob("lib/python*/site-packages")
        linked = folder / "linked"
        linked.mkdir()
        for name in {name for name, _ in requirements("normkit", extras)} - {"normkit"}:
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (linked / top).is_symlink():
                    (linked / top).symlink_to(pathlib.Path(str(distribution.locate_file(top))))
        (self.packages / "linked.pth").write_text(f"{linked}\n")

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess:
        """Run a program of the environment, without torch's warning that NumPy is missing."""
        command, quiet = [str(self.bin / program), *words], {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=quiet, timeout=120
        )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import hatchling.build; hatchling.build.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("normkit-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], check=True, timeout=300)
    (path,) = folder.glob("normkit-*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment") / "core", wheel)


def test_versions_agree(sdist, wheel):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]["version"]
    assert normkit.__version__ == version
    assert sdist.name == f"normkit-{version}.tar.gz"
    assert wheel.name == f"normkit-{version}-py3-none-any.whl"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf8")
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf8")


def test_the_sdist_holds_sources_tests_and_citation(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert {"normkit/__init__.py", "tests/test_laws.py"} <= names
    assert not any(name.startswith(("results/", "runs/")) for name in names)


def test_wheel_holds_only_package_and_entry_point(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"normkit", "normkit_command.py"}
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "normkit").rglob("*") if path.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)


def test_torch_alone_is_enough_to_import_and_to_list(core):
    imported = core.run("python", "-c", "import normkit; print(normkit.__file__, normkit.make('un', 8).spec)")
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.startswith(str(core.packages))
    listed = core.run("normkit", "list")
    assert listed.returncode == 0, listed.stderr
    for name in ("layer", "power", "un", "g2p_cmudict"):
        assert name in listed.stdout


def test_a_missing_extra_is_one_line(core):
    done = core.run("normkit", "train", "g2p_cmudict")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'normkit[demo]'" in done.stderr


def test_the_extra_demo_installs_all_imports(wheel, tmp_path):
    environment = Environment(tmp_path / "demo", wheel, ("demo",))
    code = (
        "import importlib, pkgutil, normkit\n"
        "for module in pkgutil.walk_packages(normkit.__path__, 'normkit.', onerror=lambda name: None):\n"
        "    if 'triton' not in module.name:  # comes with torch where there is a GPU for it\n"
        "        importlib.import_module(module.name)\n"
        "print(normkit.__file__)"
    )
    done = environment.run("python", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(environment.packages))
    done = environment.run("normkit", "demo", "--norms", "laier")
    assert done.returncode == 2
    assert "layer" in done.stderr
