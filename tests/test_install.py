"""The release: sdist and wheel are built, installed into a clean environment.

The environment holds only declared dependencies.

The environment holds normkit and links to the distributions that the wheel requires, directly or indirectly, so that no
test downloads torch. An undeclared dependency is therefore missing there, as it would be for a user.
"""

import ast
import importlib.metadata
import itertools
import os
import pathlib
import re
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
PROJECTS = "pyproject.toml", "papers/pyproject.toml"
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
def papers_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    code = f"import hatchling.build; hatchling.build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "papers", check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("normkit_papers-*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment") / "core", wheel)


def test_versions_agree(sdist, wheel):
    projects = [tomllib.loads((ROOT / path).read_text(encoding="utf8"))["project"] for path in PROJECTS]
    (version,) = {project["version"] for project in projects}
    assert normkit.__version__ == version
    assert sdist.name == f"normkit-{version}.tar.gz"
    assert wheel.name == f"normkit-{version}-py3-none-any.whl"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf8")
    newest = next(line for line in changes.splitlines() if line.startswith("## "))
    assert newest == "## Unreleased" or newest.startswith(f"## {version} - ")


def test_the_sdist_holds_sources_tests_and_citation(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert {"normkit/__init__.py", "tests/test_laws.py"} <= names
    assert not any(name.startswith(("results/", "runs/")) for name in names)


def test_wheels_hold_only_their_package_and_entry_point(wheel, papers_wheel):
    for path, package, folder, command in (
        (wheel, "normkit", ROOT, "normkit = normkit.cli:main"),
        (papers_wheel, "normkit_papers", ROOT / "papers", "papers = normkit_papers.cli:main"),
    ):
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        assert {name.split("/")[0].split("-")[0] for name in names} == {package}
        here = {str(file.relative_to(folder)) for file in (folder / package).rglob("*") if file.is_file()}
        assert {name for name in here if "__pycache__" not in name} <= names
        assert entry_points.split("\n")[:2] == ["[console_scripts]", command]
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_torch_alone_is_enough_to_import_and_to_list(core):
    imported = core.run("python", "-c", "import normkit; print(normkit.__file__, normkit.make('un', 8).spec)")
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.startswith(str(core.packages))
    listed = core.run("normkit", "list")
    assert listed.returncode == 0, listed.stderr
    for name in ("layer", "power", "un"):
        assert name in listed.stdout


def test_a_missing_extra_is_one_line(core, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    done = core.run("normkit", "audit", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'normkit[huggingface]'" in done.stderr


def test_the_project_of_the_papers_names_its_imports():
    project = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf8"))["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    given = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in lines}
    given.add("torch")  # comes with normkit
    owners = importlib.metadata.packages_distributions()
    imported = set()
    for path in (ROOT / "papers" / "normkit_papers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    foreign = imported - {*sys.stdlib_module_names, "normkit", "normkit_papers"}
    assert {"torch", "lightning"} <= foreign
    unnamed = [
        name
        for name in sorted(foreign)
        if given.isdisjoint(re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(name, [name]))
    ]
    assert unnamed == []
