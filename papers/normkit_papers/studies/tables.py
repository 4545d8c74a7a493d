"""The studies that `papers.toml` and `own.toml` list, and the starting points of all studies."""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from normkit_papers.recipes import RECIPES
from normkit_papers.study import PAPERS, Base, Bases, Column, Rule, Settings, Study, TableRow, Times, with_options

PAPER_WARMUP = 4000  # of UN's statistics, where the learning rate warms up over 6000
_TABLE = tomllib.loads("".join(
    Path(__file__).with_name(name).read_text(encoding="utf8") for name in ("papers.toml", "own.toml")
))  # fmt: skip


def _settings(given: Mapping[str, Any]) -> Settings:
    """Settings, with `{times = 2}` as `Times(2)`."""
    return {k: Times(v["times"]) if isinstance(v, dict) and v.keys() == {"times"} else v for k, v in given.items()}


def _scales(given: str | Mapping[str, Any]) -> dict[str, Settings]:
    return _AT[given] if isinstance(given, str) else {scale: _settings(each) for scale, each in given.items()}


def _bases(given: Mapping[str, Any]) -> Bases:
    return {
        scale: Base(folder, RECIPES[recipe], *map(_settings, changes))
        for scales, (folder, recipe, *changes) in given.items()
        for scale in scales.split(", ")
    }


BASES: dict[str, Bases] = {name: _bases(given) for name, given in _TABLE.pop("bases").items()}
SETTINGS: dict[str, Settings] = {name: _settings(given) for name, given in _TABLE.pop("settings").items()}
_AT: dict[str, dict[str, Settings]] = {name: _scales(given) for name, given in _TABLE.pop("at").items()}
NOTES: dict[str, str] = _TABLE.pop("notes")
_ROWS, _COLUMNS = _TABLE.pop("rows"), _TABLE.pop("columns")


def _use(names: str, more: Mapping[str, Any]) -> Settings:
    """Combine named settings and others."""
    named = {key: v for name in filter(None, names.split(" + ")) for key, v in SETTINGS[name].items()}
    return {**named, **_settings(more)}


def columns(entries: Any, **common: Any) -> Iterator[Column]:
    """Make columns: of names of lists or metrics, of single ones, or of metrics by title."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, str) and entry in _COLUMNS:
            yield from columns(_COLUMNS[entry], **common)
        elif isinstance(entry, str):
            yield _column(entry, entry, **common)
        elif "metric" in entry:
            yield _column(**{**common, **entry})
        else:
            yield from (_column(title, metric, **common) for title, metric in entry.items())


def _column(
    title: str, metric: str, base: str = "", use: str = "", settings: Any = (), at: Any = (), **options: Any
) -> Column:
    bases = BASES[base] if base else {}
    return Column(title, metric, bases, _use(use, dict(settings)), _scales(at or {}), **options)


def rows(entries: Iterable[Any], paper_warmup: bool = False) -> Iterator[TableRow]:
    """Make rows of names of lists, settings or norms, of single ones, or of several for each norm."""
    for entry in entries:
        if isinstance(entry, str) and entry in _ROWS:
            yield from rows(_ROWS[entry])
        elif isinstance(entry, str):
            how: dict[str, Any] = {"use": entry} if entry in SETTINGS else {"norm": entry}
            yield _row(entry.replace("'", ""), **how)
        elif "norms" in entry:
            for norm, row in itertools.product(entry["norms"], entry["rows"]):
                yield _row(row["label"].format(norm.replace("'", "")), use=row.get("use", ""), norm=norm)
        else:
            yield _row(**entry, paper_warmup=paper_warmup)


def _row(
    label: str, printed: str = "", base: Any = None, use: str = "", norm: str = "", settings: Any = (), at: Any = (),
    quoted: bool = False, paper_warmup: bool = False,
) -> TableRow:  # fmt: skip
    own = _use(use, {**({"model.norm": norm} if norm else {}), **dict(settings)})
    scales = _scales(at or {})
    if paper_warmup and norm.startswith("un("):
        scales = {**scales, "paper": {"model.norm": with_options(norm, {"warmup": PAPER_WARMUP})}}
    bases = BASES[base] if isinstance(base, str) else base and [BASES[name] for name in base]
    return TableRow(label, None if quoted else own, tuple(printed.split()), bases, scales)


def _rules(columns: Iterable[str] = (), by: float = 0.0, mean: bool = False, **kind: list[str]) -> Iterator[Rule]:
    ((how, places),) = kind.items()
    first, *others = places
    pairs = list(itertools.pairwise(places)) if how == "better" else [(first, other) for other in others or [""]]
    if how == "level":
        pairs = [pair for a, b in pairs for pair in ((a, b), (b, a))]
    least = -by if how in ("level", "most") else by
    for a, b in pairs:
        yield Rule(a, b, tuple(columns), least, mean, fails=how == "fails", raw=how == "larger")


def _study(name: str, given: dict[str, Any]) -> Study:
    common = {key: given.pop(key) for key in ("base", "use", "at") if key in given}
    note = [*(NOTES[each] for each in given.pop("notes", ())), given.pop("note", "")]
    return Study(
        id=name,
        note=" ".join(" ".join(note).split()),
        claim=" ".join(given.pop("claim", "").split()),
        columns=tuple(columns(given.pop("columns"), **common)),
        rows=tuple(rows(given.pop("rows"), name.partition(".")[0] in PAPERS)),
        rules=tuple(rule for rule in given.pop("rules", ()) for rule in _rules(**rule)),
        **given,
    )


STUDIES = tuple(_study(name, given) for name, given in _TABLE.items())
