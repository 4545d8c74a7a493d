"""The papers' tables and figures, and the starting points of all studies, which `papers.toml` lists."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normkit_papers.recipes import RECIPES
from normkit_papers.study import Base, Bases, Column, Row, Settings, Study, Times, with_options

PAPER_WARMUP = 4000  # of UN's statistics, where the learning rate warms up over 6000
_TABLE = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf8"))


def _settings(given: Mapping[str, Any]) -> Settings:
    """Settings, with `{times = 2}` as `Times(2)`."""
    return {k: Times(v["times"]) if isinstance(v, dict) and v.keys() == {"times"} else v for k, v in given.items()}


def _scales(given: Mapping[str, Any]) -> dict[str, Settings]:
    return {scale: _settings(settings) for scale, settings in given.items()}


def _bases(given: Mapping[str, Any]) -> Bases:
    return {
        scale: Base(folder, RECIPES[recipe], *map(_settings, changes))
        for scale, (folder, recipe, *changes) in given.items()
    }


BASES: dict[str, Bases] = {name: _bases(given) for name, given in _TABLE.pop("bases").items()}
SETTINGS: dict[str, Settings] = {name: _settings(given) for name, given in _TABLE.pop("settings").items()}
_AT = {name: _scales(given) for name, given in _TABLE.pop("at").items()}
_NOTES = _TABLE.pop("notes")


def _use(names: str, more: Mapping[str, Any]) -> Settings:
    """Combine named settings and others."""
    named = {key: v for name in filter(None, names.split(" + ")) for key, v in SETTINGS[name].items()}
    return {**named, **_settings(more)}


def _column(
    title: str, metric: str, base: str = "", use: str = "", settings: Any = (), at: Any = (), **options: Any
) -> Column:
    bases = BASES[base] if base else {}
    return Column(title, metric, bases, _use(use, dict(settings)), _scales(dict(at)), **options)


def _row(
    label: str, printed: str = "", base: Any = None, use: str = "", norm: str = "", settings: Any = (), at: Any = (),
    quoted: bool = False,
) -> Row:  # fmt: skip
    own = _use(use, {**({"model.norm": norm} if norm else {}), **dict(settings)})
    scales = _AT[at] if isinstance(at, str) else _scales(dict(at))
    if norm.startswith("un("):
        scales = {**scales, "paper": {"model.norm": with_options(norm, {"warmup": PAPER_WARMUP})}}
    bases = BASES[base] if isinstance(base, str) else base and [BASES[name] for name in base]
    return Row(label, None if quoted else own, tuple(printed.split()), bases, scales)


def _study(name: str, given: dict[str, Any]) -> Study:
    columns, rows = given.pop("columns"), given.pop("rows")
    common = {key: given.pop(key) for key in ("base", "use") if key in given}
    note = [*(_NOTES[each] for each in given.pop("notes", ())), given.pop("note", "")]
    return Study(
        id=name,
        note=" ".join(" ".join(note).split()),
        claim=" ".join(given.pop("claim").split()),
        columns=tuple(_column(**{**common, **column}) for column in columns),
        rows=tuple(_row(**row) for row in rows),
        **given,
    )


STUDIES = tuple(_study(name, given) for name, given in _TABLE.items())
