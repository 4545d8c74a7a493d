"""The release: sdist and wheels are built, and the wheel runs with torch alone."""

import importlib.metadata
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normkit

ROOT = pathlib.Path(__file__).parents[1]
PROJECTS = "pyproject.toml", "papers/pyproject.toml"
pytestmark = pytest.mark.slow


def required(name: str) -> set[str]:
    """The distributions that a distribution requires, directly or not, without extras; itself too."""
    needs = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    names = [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return {canonicalize_name(name)}.union(*(required(each) for each in names))


ALONE = """
import sys
from importlib.machinery import PathFinder
absent = set(sys.argv.pop(1).split(","))

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Present
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folders with the sdist, the wheel that is made of it, and the wheel of the papers."""
    folders = [tmp_path_factory.mktemp(name) for name in ("sdist", "wheel", "papers")]
    for kind, folder, root in (("sdist", folders[0], ROOT), ("wheel", folders[2], ROOT / "papers")):
        code = f"import hatchling.build; hatchling.build.build_{kind}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, timeout=300)
    (sdist,) = folders[0].glob("normkit-*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folders[1])]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], check=True, timeout=300)
    (wheel,), (papers,) = folders[1].glob("normkit-*.whl"), folders[2].glob("normkit_papers-*.whl")
    return sdist, wheel, papers


@pytest.fixture(scope="module")
def alone(built, tmp_path_factory):
    """A function that runs code with the wheel, torch and what torch requires alone."""
    folder = tmp_path_factory.mktemp("a place") / "with spaces"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(built[1])], check=True)
    given, owners = required("torch") | {"normkit"}, importlib.metadata.packages_distributions()
    absent = ",".join(top for top, names in owners.items() if given.isdisjoint(map(canonicalize_name, names)))

    def run(code: str, *words: str) -> subprocess.CompletedProcess:
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(folder)}
        command = [sys.executable, "-P", "-c", ALONE + code, absent, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=quiet, timeout=120)

    return run


def test_versions_agree(built):
    sdist, wheel, _ = built
    projects = [tomllib.loads((ROOT / path).read_text(encoding="utf8"))["project"] for path in PROJECTS]
    (version,) = {project["version"] for project in projects}
    assert normkit.__version__ == version
    assert sdist.name == f"normkit-{version}.tar.gz"
    assert wheel.name == f"normkit-{version}-py3-none-any.whl"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf8")
    newest = next(line for line in changes.splitlines() if line.startswith("## "))
    assert newest == "## Unreleased" or newest.startswith(f"## {version} - ")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert {"normkit/__init__.py", "tests/test_laws.py"} <= names


def test_wheels_hold_only_their_package_and_entry_point(built):
    for path, package, folder, command in (
        (built[1], "normkit", ROOT, "normkit = normkit.cli:main"),
        (built[2], "normkit_papers", ROOT / "papers", "papers = normkit_papers.cli:main"),
    ):
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        assert {name.split("/")[0].split("-")[0] for name in names} == {package}
        here = {str(file.relative_to(folder)) for file in (folder / package).rglob("*") if file.is_file()}
        assert {name for name in here if "__pycache__" not in name} <= names
        assert entry_points.split("\n")[:2] == ["[console_scripts]", command]
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(built[1]).namelist())


def test_torch_alone_is_enough(alone, tmp_path):
    done = alone("import normkit; from normkit.cli import main; print(normkit.__file__); sys.exit(main(['list']))")
    assert done.returncode == 0, done.stderr
    assert "with spaces" in done.stdout
    assert all(f"  {name} " in done.stdout for name in normkit.NORMS)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    done = alone("from normkit.cli import main; sys.exit(main(sys.argv[1:]))", "audit", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "normkit[huggingface]" in done.stderr


def test_the_project_of_the_papers_names_its_imports():
    project = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf8"))["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    given = {canonicalize_name(Requirement(line).name) for line in lines}
    owners = importlib.metadata.packages_distributions()
    files = [path.read_text(encoding="utf8") for path in (ROOT / "papers" / "normkit_papers").rglob("*.py")]
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", "\n".join(files), re.MULTILINE))
    foreign = imported - {*sys.stdlib_module_names, "normkit", "normkit_papers", "torch"}  # torch comes with normkit
    assert "lightning" in foreign
    assert not [name for name in foreign if given.isdisjoint(map(canonicalize_name, owners.get(name, [name])))]
