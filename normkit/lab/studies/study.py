"""A study: a grid of runs with the figures that a paper printed for them."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from normkit.lab.report.settings import flat
from normkit.lab.studies.metrics import METRICS
from normkit.lab.train.config import Run
from normkit.names import pick
from normkit.norms import options, parse
from normkit.text import format_spec

SCALES = ("pocket", "gpu", "paper")
ELSEWHERE = ("name", "device", "threads")  # settings that say where a run was made, not what it is
AFTER_WARMUP = ("r_until", "d_until", "until")  # options of norms that count steps from the start
LONGEST = 100  # characters of a folder's name

Settings = Mapping[str, Any]
"""Fields of a `Run` to replace, those of its parts with a dot: `{"model.norm": "un", "warmup": Times(2)}`."""


class Times(NamedTuple):
    """In settings: so many times what the base run has."""

    factor: float


class Base(NamedTuple):
    """Starting point of a column's runs: a recipe with some settings replaced.

    Attributes:
        name: Folder of the runs.
        recipe: Function that returns the `Run`.
        settings: Settings that replace the recipe's.
    """

    name: str
    recipe: Callable[[], Run]
    settings: Settings = MappingProxyType({})


Bases = Mapping[str, Base]
"""Bases of one column by scale. A scale without an entry has not been run: the table shows the paper's figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a paper's table: which number of which runs."""

    title: str
    """As the paper heads it, in our words."""
    metric: str
    """A row of METRICS."""
    base: Bases = dataclasses.field(default_factory=dict)
    """By scale; a scale that is not there has not been run yet, for want of data or of a recipe."""
    settings: Settings = dataclasses.field(default_factory=dict)
    """What this column changes in its base."""
    at: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    """Further settings at some scale."""
    options: Settings = dataclasses.field(default_factory=dict)
    """Options of the rows' norms in this column, of those norms that have them and do not say otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a paper's table: a way to train, and what the paper printed for it."""

    label: str
    settings: Settings | None
    """What this row changes in each column's base; None for what normkit has not: the paper alone is shown."""
    printed: tuple[str, ...] = ()
    """The paper's figure for each column, digit by digit."""
    base: Bases | None = None
    """What this row starts from in place of the columns' bases."""
    at: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    """Further settings at some scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure of a paper, or a question of our own, as a grid of runs: rows times columns times seeds.

    >>> from normkit.lab.studies.recipes import g2p_cmudict
    >>> base = {"pocket": Base("toy", g2p_cmudict, {"steps": 10})}
    >>> rows = (Row(label="LN", settings={}), Row(label="UN", settings={"model.norm": "un"}))
    >>> study = Study(id="toy", title="Toy", columns=(Column(title="PER", metric="per", base=base),), rows=rows)
    >>> [str(cell.folder) for cell in expand(study, "pocket")]
    ['pocket/toy/layer', 'pocket/toy/un']
    """

    id: str
    """As `pn.table2`."""
    title: str
    """What is compared, in a line."""
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    source: str = ""
    """Paper and place, as "PowerNorm, Table 2"; empty for a question of our own."""
    claim: str = ""
    """What the paper sees in it; figures print no numbers, so this is what ours are held against."""
    note: str = ""
    """Where our runs differ from the paper's at every scale."""

    def __post_init__(self):
        for column in self.columns:
            pick(METRICS, column.metric, "metric")
        for row in self.rows:
            if row.printed and len(row.printed) != len(self.columns):
                raise ValueError(
                    f"{self.id}: {row.label} has {len(row.printed)} figures for {len(self.columns)} columns"
                )

    @property
    def scales(self) -> tuple[str, ...]:
        """Scales at which something of it can be run."""
        return tuple(scale for scale in SCALES if expand(self, scale))


class Cell(NamedTuple):
    """A place of the grid: which row and column, the run without its seed, and the folder of its seeds."""

    row: int
    column: int
    run: Run
    folder: Path


def expand(study: Study, scale: str, only: Sequence[str] = ()) -> list[Cell]:
    """The cells of a study that can be run at a scale, row by row; `only` takes rows of these norms or labels.

    ValueError for a scale that there is not, and for a name in `only` that is in no row.
    """
    if scale not in SCALES:
        raise ValueError(f"there is no scale {scale!r}; there are {', '.join(SCALES)}")
    rows = {number: row for number, row in enumerate(study.rows) if not only or _names(row) & set(only)}
    known = set().union(*map(_names, study.rows))
    for name in only:
        pick(dict.fromkeys(sorted(known)), name, f"row of {study.id}")
    cells = []
    for number, row in rows.items():
        for place, column in enumerate(study.columns):
            base = (column.base if row.base is None else row.base).get(scale)
            if base is None or row.settings is None:
                continue
            start = override(base.recipe(), base.settings)
            wanted = override(start, {**column.settings, **column.at.get(scale, {})})
            wanted = override(override(wanted, row.settings), row.at.get(scale, {}))
            wanted = override(wanted, {"model.norm": with_options(wanted.model.norm, column.options)})
            if set(wanted.model.norm_at.values()) == {wanted.model.norm}:  # one norm everywhere, said twice
                wanted = override(wanted, {"model.norm_at": {}})
            folder = Path(scale) / base.name / name_of(start, wanted)
            cells.append(Cell(number, place, _settle(wanted, scale, folder), folder))
    return cells


def override(run: Run, settings: Settings) -> Run:
    """A run with some settings replaced.

    >>> from normkit.lab.studies.recipes import g2p_cmudict
    >>> run = override(g2p_cmudict(), {"model.norm": "un", "warmup": Times(2)})
    >>> run.model.norm, run.warmup
    ('un', 1000)
    """
    changed: dict[str, dict[str, Any]] = {"": {}, "model": {}, "images": {}}
    for name, value in settings.items():
        part, _, field = name.rpartition(".")
        of, found = getattr(run, part, None) if part else run, changed.get(part, {})
        if part not in changed or not hasattr(of, field):
            raise ValueError(f"a run has no setting {name!r}")
        if isinstance(value, Times):
            before = getattr(of, field)
            value = max(1, round(before * value.factor)) if isinstance(before, int) else before * value.factor  # noqa: PLW2901
        found[field] = value
    own, model, images = changed.values()
    parts = {"model": dataclasses.replace(run.model, **model), "images": dataclasses.replace(run.images, **images)}
    return dataclasses.replace(run, **own, **parts)


def with_options(spec: str, more: Settings) -> str:
    """A norm with further options, of those that it has and does not say itself; all in the order of its own.

    >>> with_options("un(window=2)", {"alpha": 0.8, "window": 4}), with_options("layer", {"alpha": 0.8})
    ('un(window=2, alpha=0.8)', 'layer')
    """
    name, given = parse(spec)
    own = options(name)
    if not more.keys() & own.keys() - given.keys():
        return spec
    return format_spec(name, {key: {**more, **given}[key] for key in own if key in given or key in more})


def warmed(spec: str, warmup: int) -> str:
    """A norm whose statistics warm up as long as the learning rate does, unless it says otherwise.

    Phases that follow the warm-up keep their length in proportion to it.

    >>> warmed("un(window=2)", 100), warmed("layer", 100)
    ('un(window=2, warmup=100)', 'layer')
    >>> warmed("renorm", 100)
    'renorm(warmup=100, r_until=800, d_until=500)'
    """
    name, given = parse(spec)
    own = options(name)
    if "warmup" in own and "warmup" not in given:
        warmup = max(1, warmup)
        stretch = warmup / int(str(own["warmup"]))
        longer = {key: round(int(str(own[key])) * stretch) for key in AFTER_WARMUP if key in own}
        given = {**given, "warmup": warmup, **{key: value for key, value in longer.items() if key not in given}}
    return format_spec(name, given) if given else spec


def warm(run: Run) -> Run:
    """A run in which all norms are `warmed`: with a default of 4,000 steps, shorter runs would never leave the warm-up.

    >>> from normkit.lab.studies.recipes import g2p_cmudict
    >>> run = override(g2p_cmudict(), {"model.norm": "un", "model.norm_at": {"*.final": "mabn(warmup=9)"}})
    >>> warm(run).model.norm, warm(run).model.norm_at
    ('un(warmup=500)', {'*.final': 'mabn(warmup=9)'})
    """
    norm_at = {place: warmed(spec, run.warmup) for place, spec in run.model.norm_at.items()}
    return override(run, {"model.norm": warmed(run.model.norm, run.warmup), "model.norm_at": norm_at})


def name_of(base: Run, run: Run) -> str:
    """What tells a run from its base: the norm, then what else differs, as the name of a folder.

    >>> from normkit.lab.studies.recipes import g2p_cmudict
    >>> base = g2p_cmudict()
    >>> name_of(base, override(base, {"model.norm": "power(groups=0)", "model.placement": "post"}))
    'power-groups=0,placement=post'
    """
    before, after = flat(dataclasses.asdict(base)), flat(dataclasses.asdict(run))
    parts = [run.model.norm]
    for key, value in after.items():
        if value != before.get(key) and key not in ("name", "model.norm"):
            text = ",".join(f"{place}={norm}" for place, norm in value.items()) if isinstance(value, dict) else value
            parts.append(text if isinstance(value, dict) else f"{key.removeprefix('model.')}={text}")
    name = ",".join(re.sub(r"[^\w.=]+", "-", str(part)).strip("-") for part in parts)
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def seeded(cell: Cell, out: Path, seed: int) -> tuple[Path, Run]:
    """Folder and run of one seed of a cell."""
    return out / cell.folder / f"seed-{seed}", dataclasses.replace(
        cell.run, seed=seed, name=f"{cell.run.name}/seed-{seed}"
    )


def seeds(folder: Path) -> dict[int, Path]:
    """The folders of a cell's seeds; a copy that somebody keeps beside them (seed-0-old) is none."""
    return {int(path.name[5:]): path for path in folder.glob("seed-*") if re.fullmatch(r"seed-(0|[1-9]\d*)", path.name)}


def differences(found: Settings, wanted: Run) -> list[str]:
    """Settings of a result's run that are not those of `wanted`, a line each; where it was run does not count."""
    have, want = flat(dict(found)), flat(dataclasses.asdict(wanted))
    defaults = flat(dataclasses.asdict(Run(name="", task="", data="", steps=1)))
    return [
        f"{name} {have.get(name, defaults.get(name))!r} where the study has {value!r}"
        for name, value in want.items()
        if name not in ELSEWHERE and _plain(have.get(name, defaults.get(name))) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _names(row: Row) -> set[str]:
    """What a row answers to: its label, its norm with and without options."""
    spec = (row.settings or {}).get("model.norm", "layer" if row.settings is not None else "")
    return {row.label} | ({spec, parse(spec)[0]} if spec else set())


def _settle(run: Run, scale: str, folder: Path) -> Run:
    """The run as it is trained: its name, its device, statistics that warm up, checkpoints to resume from."""
    where: dict[str, Any] = {"device": "cpu", "threads": 1} if scale == "pocket" else {"device": "cuda"}
    every = run.checkpoint_every or max(1, run.steps // 10)
    keep = max(run.average, 2)  # checkpoints of many runs fill a disk
    return dataclasses.replace(warm(run), name=str(folder), checkpoint_every=every, keep=keep, **where)


def unique(cells: Iterable[Cell]) -> list[Cell]:
    """Cells without those that share another one's runs."""
    return list({cell.folder: cell for cell in reversed(list(cells))}.values())[::-1]
