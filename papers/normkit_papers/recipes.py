"""Recipes, which `recipes.toml` lists: runs by name, of the papers' own sizes and of smaller ones."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normkit_papers.train.config import RUN, Run

PARTS = ("model", "images")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A named run, with what it trains and what to expect; calling it makes the run.

    >>> RECIPES["lm_ptb_pocket"]().model.attention
    'multilinear'
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    note: str = ""
    flags: str = ""

    def __call__(self) -> Run:
        """Make the run."""
        return RUN.validate_python({"name": self.name, **self.settings})

    @property
    def description(self) -> str:
        """All about the recipe, for its help."""
        command = f"papers train {self.name} {self.flags}\n\n" if self.flags else ""
        return f"{self.about}\n\n{command}{self.note}"


def _read(path: Path) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for name, given in tomllib.loads(path.read_text(encoding="utf8")).items():
        base = found[given.pop("base")].settings if "base" in given else {}
        if "valid_every" in given:
            given.setdefault("checkpoint_every", given["valid_every"])
        texts = {key: " ".join(given.pop(key).split()) for key in ("about", "note", "flags") if key in given}
        parts = {part: {**base.get(part, {}), **given.get(part, {})} for part in PARTS if part in {*base, *given}}
        found[name] = Recipe(name, settings={**base, **given, **parts}, **texts)
    return found


RECIPES = _read(Path(__file__).with_name("recipes.toml"))
"""By name."""
