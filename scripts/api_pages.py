"""Write the reference pages in docs/api/ from the docstrings.

They are Markdown that needs no build.

python scripts/api_pages.py            # write the pages
python scripts/api_pages.py --check    # exit with status 1 if a page is out of date
"""

import inspect
import pydoc
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"
PAGES = {  # page: its title, the packages that it documents
    "norms": ("Norms", ("normkit.norms",)),
    "transforms": ("Transforms", ("normkit.transforms",)),
    "watch": ("Watch", ("normkit.watch",)),
    "kernels": ("Kernels", ("normkit.kernels",)),
    "lab": ("Laboratory", ("normkit.lab",)),
}
NOTE = "Generated from the docstrings by `python scripts/api_pages.py`; edit those.\n"


def modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the public modules of a package, the package first."""
    yield package
    for _, member in sorted(package.members.items()):
        if isinstance(member, griffe.Module) and not member.is_alias:
            yield from modules(member)


def signature(item: griffe.Class | griffe.Function) -> str:
    """Format name and parameters as one line of code.

    Keyword-only options with their defaults.
    """
    if isinstance(item, griffe.Class) and item.path.startswith("normkit.norms."):  # options are class attributes there
        shown = inspect.signature(pydoc.locate(item.path))  # type: ignore[arg-type]
        plain = [p.replace(annotation=p.empty) for p in shown.parameters.values()]
        return f"{item.name}{inspect.Signature(plain)}"
    parameters, star = [], False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not star:
            parameters.append("*")
            star = True
        star = star or kind is griffe.ParameterKind.var_positional
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        default = "" if parameter.default is None or stars else f"={parameter.default}"
        parameters.append(f"{stars}{parameter.name}{default}")
    return f"{item.name}({', '.join(parameters)})"


def text(item: griffe.Object) -> str:
    """Format a docstring's sections: prose, tables of arguments and errors, examples as code."""
    if item.docstring is None:
        return ""
    parts = []
    for section in item.docstring.parse("google", warnings=False):
        kind, value = section.kind.value, section.value
        if kind == "text":
            parts.append(fenced(value))
        elif kind in ("parameters", "attributes", "other parameters"):
            parts.append("\n".join(f"- `{entry.name}`: {flat(entry.description)}" for entry in value))
        elif kind in ("returns", "yields"):
            parts.append(f"Returns: {flat(' '.join(entry.description for entry in value))}")
        elif kind in ("raises", "warns"):
            lines = [f"- `{entry.annotation}`: {flat(entry.description)}" for entry in value]
            parts.append("Raises:\n\n" + "\n".join(lines))
        elif kind == "examples":
            parts += [fenced(body) if tag.value == "text" else f"```pycon\n{body}\n```" for tag, body in value]
        elif kind == "admonition":
            code = value.description.startswith(">>>")
            body = f"\n\n{fenced(value.description)}" if code else f" {flat(value.description)}"
            parts.append(f"**{section.title or value.kind}**{body}")
    return "\n\n".join(parts)


def flat(description: str) -> str:
    """Join the lines of a description into one."""
    return " ".join(description.split())


def fenced(prose: str) -> str:
    """Put fences around doctests that stand in prose."""
    blocks = []
    for block in prose.split("\n\n"):
        blocks.append(f"```pycon\n{block}\n```" if block.lstrip().startswith(">>>") else block)
    return "\n\n".join(blocks)


def described(module: griffe.Module, brief: bool) -> str:
    """Format one module: its summary, then every public class and function.

    `brief` keeps their summary lines.
    """
    out = [f"## {module.path}", text(module)]
    for item in module.members.values():
        if item.is_alias or item.name.startswith("_") or not isinstance(item, griffe.Class | griffe.Function):
            continue
        if brief:
            summary = item.docstring.value.splitlines()[0] if item.docstring else ""
            out.append(f"- `{signature(item)}`: {summary}")
            continue
        out += [f"### {item.name} {{#{item.path}}}", f"```\n{signature(item)}\n```", text(item)]
        if isinstance(item, griffe.Class):
            for method in item.members.values():
                if isinstance(method, griffe.Function) and not method.name.startswith("_") and method.docstring:
                    summary = method.docstring.value.splitlines()[0]
                    out.append(f"- `{signature(method)}`: {summary}")
    return "\n\n".join(part for part in out if part)


def page(title: str, packages: tuple[str, ...]) -> str:
    """Format a page of the reference."""
    parts = [f"# {title}", NOTE]
    for package in packages:
        root = griffe.load(package, search_paths=[str(ROOT)], resolve_aliases=False)
        parts += [described(module, "lab" in package) for module in modules(root) if not module.name.startswith("__")]  # type: ignore[arg-type]
    return "\n\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def main(check: bool) -> int:
    """Write the pages, or compare them with the files."""
    API.mkdir(exist_ok=True)
    old = []
    for name, (title, packages) in PAGES.items():
        path, new = API / f"{name}.md", page(title, packages)
        if not path.is_file() or path.read_text(encoding="utf8") != new:
            old.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new, encoding="utf8")
    if check and old:
        sys.stderr.write(f"out of date: {', '.join(map(str, old))}; run `python scripts/api_pages.py`\n")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
