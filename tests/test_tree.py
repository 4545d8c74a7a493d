"""The layout that docs/architecture.md describes.

Read from the import statements and the sizes of files.
"""

import ast
import functools
import importlib.metadata
import pathlib
import re
import statistics
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "normkit"
PACKAGES = {  # package -> packages that it may import
    "kernels": set(),
    "norms": {"kernels"},
    "transforms": {"kernels", "norms"},
    "watch": {"kernels", "norms", "transforms"},
    "lab": {"kernels", "norms", "transforms", "watch"},
    "cli": {"kernels", "norms", "transforms", "watch", "lab"},
}
LAB = {  # the same inside lab/
    "fields": set(),
    "tasks": set(),
    "timing": set(),
    "op_counter": set(),
    "released": set(),
    "cka": set(),
    "pretrained": set(),
    "singular_values": set(),
    "norm_speed": {"timing", "op_counter"},
    "data": set(),
    "models": {"fields"},
    "report": {"tasks", "fields"},
    "train": {"models", "data", "report", "tasks", "fields", "timing", "singular_values", "pretrained"},
    "inference": {"models", "data", "train", "report"},
    "metrics": {"tasks", "train"},
    "study": {"metrics", "report", "train"},
    "recipes": {"study", "models", "train"},
    "papers": {"study", "recipes", "models", "train", "report", "tasks"},
    "studies": {"tasks", "study", "cka", "recipes", "metrics", "papers", "models", "data", "train", "report", "timing"},
}
ALLOWED = {  # third party -> where it may be imported
    "torch": set(PACKAGES),
    "pyarrow": {"watch", "lab"},
    "triton": {"kernels"},
    "safetensors": {"lab", "transforms"},
    "onnx": {"transforms"},
    "onnxruntime": {"transforms"},
    "onnxscript": {"transforms"},
    "openvino": {"transforms"},
    "executorch": {"transforms"},
    "nncf": {"transforms"},
    "torchao": {"transforms"},
    "transformers": {"transforms", "lab"},
    "tyro": {"cli"},
    "rich": {"cli", "lab", "transforms"},
    "lightning": {"lab"}, "tokenizers": {"lab"}, "sacrebleu": {"lab"}, "jiwer": {"lab"}, "sklearn": {"lab"},
    "scipy": {"lab"}, "numpy": {"lab"}, "matplotlib": {"lab"}, "jinja2": {"lab"}, "markupsafe": {"lab"},
    "ray": {"lab"}, "timm": {"lab"}, "torchmetrics": {"lab"}, "PIL": {"lab"}, "pycocotools": {"lab"},
    "torchvision": {"lab"},
}  # fmt: skip
SHARED = {"arguments", "names", "files", "text"}  # files that all packages may import, and that import nothing of ours
LONGEST = 450  # lines of a file
TYPICAL = 120  # median length of the package's files
LIBRARY_LINES = 14_900  # lines of the library, C++ included; the aim is 11,000
FILES = sorted(PACKAGE.rglob("*.py"))
EVERYWHERE = sorted(
    path for folder in ("normkit", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)


def package(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


@functools.cache
def imports(path: pathlib.Path, on_import: bool = False) -> list[str]:
    """Names of the modules that a file imports, late ones included unless `on_import`."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    found = []
    for node in tree.body if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found += [
                f"{node.module}.{alias.name}" if node.module == "normkit" else node.module for alias in node.names
            ]
    return found


def test_packages_import_only_what_they_may():
    wrong = []
    for path in FILES:
        here = package(path)
        if here == "__init__":
            continue
        for module in imports(path):
            parts = module.split(".")
            foreign = parts[0] == "normkit" and len(parts) > 1 and parts[1] in {*PACKAGES, *SHARED} and parts[1] != here
            if foreign and (here in SHARED or parts[1] not in PACKAGES[here] | SHARED):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_parts_of_the_laboratory_import_only_what_they_may():
    wrong = []
    for path in (PACKAGE / "lab").rglob("*.py"):
        parts = path.relative_to(PACKAGE / "lab").with_suffix("").parts
        for module in imports(path):
            other = module.removeprefix("normkit.lab.").split(".")[0]
            if module.startswith("normkit.lab.") and other != parts[0] and other not in LAB[parts[0]]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_package_is_listed():
    assert {package(path) for path in FILES} <= {*PACKAGES, *SHARED, "__init__"}


def test_third_parties_are_imported_only_where_listed():
    wrong = []
    for path in FILES:
        for module in imports(path):
            party = module.split(".")[0]
            if party in sys.stdlib_module_names or party == "normkit":
                continue
            if package(path) not in ALLOWED.get(party, set()):
                wrong.append(f"{path.relative_to(ROOT)} imports {party}")
    assert not wrong


def test_imports_are_declared_dependencies():
    """An undeclared dependency works here because another package installs it.

    Elsewhere the import fails.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    extras = project["optional-dependencies"]
    users = [line for extra, lines in extras.items() for line in lines if extra != "dev"]
    declared = {re.split(r"[\[<>=]", line)[0].lower() for line in [*project["dependencies"], *users]}
    brought_by = importlib.metadata.packages_distributions()
    wrong = []
    for path in FILES:
        for party in {module.split(".")[0] for module in imports(path)} - sys.stdlib_module_names - {"normkit"}:
            if not {name.lower() for name in brought_by.get(party, [party])} & declared:
                wrong.append(f"{path.relative_to(ROOT)} imports {party}")
    assert not wrong


def test_there_are_no_import_circles():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {m for m in imports(path, on_import=True) if m.split(".")[0] == "normkit"}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a circle of imports: {' -> '.join([*trail, name])}"
        if name in done:
            return
        for other in graph.get(name, ()):
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf8").splitlines()) <= LONGEST


def test_the_library_is_small():
    lengths = [len(path.read_text(encoding="utf8").splitlines()) for path in FILES]
    assert statistics.median(lengths) <= TYPICAL
    library = [p for name in ("norms", "kernels", "transforms", "watch") for p in (PACKAGE / name).rglob("*")]
    sources = [path for path in library if path.suffix in (".py", ".h", ".cpp")]
    assert sum(len(path.read_text(encoding="utf8").splitlines()) for path in sources) < LIBRARY_LINES


def test_importing_normkit_takes_torch_alone():
    """No third party, no part of torch that `import torch` leaves out.

    No package that norms do not need.
    """
    code = "import sys, torch; before = set(sys.modules); import normkit; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    new = [name for name in out.split() if name.split(".")[0] not in sys.stdlib_module_names]
    assert [name for name in new if name.split(".")[0] != "normkit"] == []
    packages = {"norms", "kernels", "transforms", "watch", "arguments", "names", "text", "files"}
    assert {name.split(".")[1] for name in new if "." in name} <= packages


def test_there_are_no_catch_all_modules():
    assert not list(PACKAGE.rglob("utils.py"))
    assert not [path for path in PACKAGE.rglob("*") if path.suffix in (".yaml", ".yml")]
