"""Study: a grid of runs beside the figures that a paper printed for them."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from normkit._util import format_spec, pick
from normkit.norms import options, parse
from normkit_papers.report.settings import flat
from normkit_papers.train.config import Run

SCALES = ("pocket", "gpu", "paper")
PAPERS = {"pn": "PowerNorm", "tears": "Transformers without Tears", "un": "Unified Normalization"}
AFTER_WARMUP = ("r_until", "d_until", "until")  # options of norms that count steps from the start
MAX_NAME = 100  # characters of a folder's name

Settings = Mapping[str, Any]
"""Fields of a `Run` to replace; those of its parts with a dot: `{"model.norm": "un", "warmup": Times(2)}`."""


class Times(NamedTuple):
    """Value in settings: the base run's value times `factor`."""

    factor: float


class Base(NamedTuple):
    """Start of a column's runs: their folder, a recipe, and settings that replace the recipe's."""

    name: str
    recipe: Callable[[], Run]
    settings: Settings = MappingProxyType({})


Bases = Mapping[str, Base]
"""Bases of one column by scale. A scale without an entry has not been run: the table shows the paper's figures."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: a metric of some runs, and what it changes in their base and norms.

    `at` are further settings by scale, `options` are for norms that have them and do not set them.
    """

    title: str
    metric: str
    base: Bases = dataclasses.field(default_factory=dict)
    settings: Settings = dataclasses.field(default_factory=dict)
    at: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    options: Settings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A row of a table: a way to train, and the figures that the paper printed for it.

    `settings` are None for figures that the paper quotes from others; `base` is in place of those of the columns, one
    for all or one for each.
    """

    label: str
    settings: Settings | None
    printed: tuple[str, ...] = ()
    base: Bases | Sequence[Bases] | None = None
    at: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names by which `--only` selects this row: its label, its norm with and without options."""
        if self.settings is None:
            return {self.label}
        spec = self.settings.get("model.norm", "layer")
        return {self.label, spec, parse(spec)[0]}


class Rule(NamedTuple):
    """What the paper claims of a row: it is better than another by at least `by`.

    Attributes:
        row: Label of the row; "ROW @ COLUMN" takes its number from that column instead.
        than: Label of the other row; empty to compare the number itself with `by`.
        columns: Titles of the columns, in each of which the rule must hold; empty for all in which both rows ran.
        by: Least difference, in units of the metric; below 0, the row may be worse by this much.
        mean: The rule is about the mean over the columns.
        fails: The row diverges, or its score is below 0.6 of the best row's.
        raw: Larger counts, whether or not it is better.
    """

    row: str
    than: str = ""
    columns: tuple[str, ...] = ()
    by: float = 0.0
    mean: bool = False
    fails: bool = False
    raw: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure of a paper, or our own question: a grid of rows x columns x seeds.

    Its id is a key of PAPERS and a place, such as `pn.table2`, or a name of ours. `rules` decide whether our results
    agree with the `claim`. A study without runs of its own has the `script` that measures its numbers.

    >>> from normkit_papers.recipes import RECIPES
    >>> base = {"pocket": Base("toy", RECIPES["g2p_cmudict"], {"steps": 10})}
    >>> rows = (TableRow("LN", {}), TableRow("UN", {"model.norm": "un"}))
    >>> study = Study(id="toy", title="Toy", columns=(Column("PER", "per", base),), rows=rows)
    >>> [str(cell.folder) for cell in expand(study, "pocket")]
    ['pocket/toy/layer', 'pocket/toy/un']
    """

    id: str
    title: str
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    claim: str = ""
    note: str = ""
    seeds: int = 1
    script: str = ""
    rules: tuple[Rule, ...] = ()

    @property
    def source(self) -> str:
        """Paper and place, such as "PowerNorm, Table 2"; empty for a question of our own."""
        paper, _, place = self.id.partition(".")
        return re.sub(r"(\d+)", r" \1", f"{PAPERS[paper]}, {place.capitalize()}") if paper in PAPERS else ""

    @property
    def scales(self) -> tuple[str, ...]:
        """Scales at which some of the study can be run."""
        places = [(row, place) for row in self.rows if row.settings is not None for place in range(len(self.columns))]
        return tuple(scale for scale in SCALES if any(self.base(row, place, scale) for row, place in places))

    def base(self, row: TableRow, place: int, scale: str) -> Base | None:
        """Return the base of a row in the column at `place`, or None at other scales."""
        bases = self.columns[place].base if row.base is None else row.base
        return (bases if isinstance(bases, Mapping) else bases[place]).get(scale)


class Cell(NamedTuple):
    """A place of the grid: row, column, the run without its seed, and the folder of its seeds."""

    row: int
    column: int
    run: Run
    folder: Path


def expand(study: Study, scale: str, only: Sequence[str] = ()) -> list[Cell]:
    """List the cells of a study that can be run at a scale, row by row.

    `only` has labels of rows, or norms, for all rows with this norm; it is empty for all rows.

    Raises:
        ValueError: If the scale is unknown, or no row has a name in `only`.
    """
    if scale not in SCALES:
        raise ValueError(f"there is no scale {scale!r}; there are {', '.join(SCALES)}")
    names = sorted(set().union(*(row.names for row in study.rows)))
    for name in only:
        pick(dict.fromkeys(names), name, f"row of {study.id}")
    labels = {row.label for row in study.rows}
    norms = set(only) - labels
    cells = []
    for number, row in enumerate(study.rows):
        if row.settings is None or (only and row.label not in only and row.names.isdisjoint(norms)):
            continue
        for place, column in enumerate(study.columns):
            if (base := study.base(row, place, scale)) is None:
                continue
            start = run = override(base.recipe(), base.settings)
            for settings in ({**column.settings, **column.at.get(scale, {})}, row.settings, row.at.get(scale, {})):
                run = override(run, settings)
            if column.options:
                run = override(run, {"model.norm": with_options(run.model.norm, column.options)})
            at = {name: plain(spec) for name, spec in run.model.norm_at.items()}
            run = override(run, {"model.norm": plain(run.model.norm), "model.norm_at": at})
            if set(run.model.norm_at.values()) == {run.model.norm}:  # the same norm everywhere, written twice
                run = override(run, {"model.norm_at": {}})
            folder = Path(scale) / base.name / folder_name(start, run)
            cells.append(Cell(number, place, _complete(run, scale, folder), folder))
    return cells


def override(run: Run, settings: Settings) -> Run:
    """Replace some settings of a run.

    >>> from normkit_papers.recipes import RECIPES
    >>> run = override(RECIPES["g2p_cmudict"](), {"model.norm": "un", "warmup": Times(2)})
    >>> run.model.norm, run.warmup
    ('un', 1000)
    """
    if not settings:
        return run
    changes: dict[str, dict[str, Any]] = {"": {}}
    for name, value in settings.items():
        part, _, field = name.rpartition(".")
        owner = getattr(run, part, None) if part else run
        if not (dataclasses.is_dataclass(owner) and hasattr(owner, field)):
            raise ValueError(f"a run has no setting {name!r}")
        if isinstance(value, Times):
            product = getattr(owner, field) * value.factor
            value = max(1, round(product)) if isinstance(getattr(owner, field), int) else product  # noqa: PLW2901
        changes.setdefault(part, {})[field] = value
    own = changes.pop("")
    parts = {part: dataclasses.replace(getattr(run, part), **changed) for part, changed in changes.items()}
    return dataclasses.replace(run, **own, **parts)


def with_options(spec: str, more: Settings) -> str:
    """Add options to a norm: those that it has and does not set, all in the norm's own order.

    >>> with_options("un(window=2)", {"alpha": 0.8, "window": 4}), with_options("layer", {"alpha": 0.8})
    ('un(window=2, alpha=0.8)', 'layer')
    """
    name, given = parse(spec)
    merged = {key: {**more, **given}[key] for key in options(name) if key in given or key in more}
    return format_spec(name, merged) if merged.keys() - given.keys() else spec


def plain(spec: str) -> str:
    """Leave out options that have their default, so that one norm has one name.

    A `warmup` stays; see `warmed`.

    >>> plain("un(window=4, alpha=0.8)"), plain("un(warmup=auto)")
    ('un(alpha=0.8)', 'un(warmup=auto)')
    """
    name, given = parse(spec)
    kept = {key: value for key, value in given.items() if key == "warmup" or value != options(name)[key]}
    return spec if kept.keys() == given.keys() else format_spec(name, kept)


def warmed(spec: str, warmup: int, automatic: bool = False) -> str:
    """Let the statistics of a norm warm up as long as the learning rate, as in the papers.

    A `warmup` in the spec stays. Phases after the warm-up keep their length in proportion to it. With `automatic`,
    norms that can end their warm-up by drift do so instead, as is their default.

    >>> warmed("un(window=2)", 100), warmed("un", 100, automatic=True), warmed("layer", 100)
    ('un(window=2, warmup=100)', 'un', 'layer')
    >>> warmed("renorm", 100)
    'renorm(warmup=100, r_until=800, d_until=500)'
    """
    name, given = parse(spec)
    own = options(name)
    default = own.get("warmup")
    if default is None or "warmup" in given or (automatic and default == "auto"):
        return format_spec(name, given) if given else spec
    warmup = max(1, warmup)
    later = [key for key in AFTER_WARMUP if key in own and key not in given]
    longer = {key: round(int(str(own[key])) * (warmup / int(str(default)))) for key in later}
    return format_spec(name, {**given, "warmup": warmup, **longer})


def warm(run: Run, automatic: bool = False) -> Run:
    """Apply `warmed` to all norms.

    >>> from normkit_papers.recipes import RECIPES
    >>> run = override(RECIPES["g2p_cmudict"](), {"model.norm": "un", "model.norm_at": {"*.final": "mabn(warmup=9)"}})
    >>> warm(run).model.norm, warm(run).model.norm_at
    ('un(warmup=500)', {'*.final': 'mabn(warmup=9)'})
    """
    norm_at = {place: warmed(spec, run.warmup, automatic) for place, spec in run.model.norm_at.items()}
    return override(run, {"model.norm": warmed(run.model.norm, run.warmup, automatic), "model.norm_at": norm_at})


def folder_name(base: Run, run: Run) -> str:
    """Name a run's folder by its norm and the other settings that differ from its base.

    >>> from normkit_papers.recipes import RECIPES
    >>> base = RECIPES["g2p_cmudict"]()
    >>> folder_name(base, override(base, {"model.norm": "power(groups=0)", "model.placement": "post"}))
    'power-groups=0,placement=post'
    """
    before, after = flat(dataclasses.asdict(base)), flat(dataclasses.asdict(run))
    parts = [run.model.norm]
    for key, value in after.items():
        if value == before.get(key) or key in ("name", "model.norm"):
            continue
        if isinstance(value, dict):
            parts.append(",".join(f"{place}={norm}" for place, norm in value.items()))
        else:
            parts.append(f"{key.removeprefix('model.')}={value}")
    name = ",".join(map(slug, parts))
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def slug(text: str) -> str:
    """Turn a spec, or another setting, into a part of a folder's name.

    >>> slug("power(groups=0)")
    'power-groups=0'
    """
    return re.sub(r"[^\w.=]+", "-", text).strip("-")


def seeded(cell: Cell, out: Path, seed: int) -> tuple[Path, Run]:
    """Folder and run of one seed of a cell."""
    run = dataclasses.replace(cell.run, seed=seed, name=f"{cell.run.name}/seed-{seed}")
    return out / cell.folder / f"seed-{seed}", run


def seeds(folder: Path) -> dict[int, Path]:
    """Folders of a cell's seeds; a copy beside them, such as seed-0-old, is ignored."""
    return {int(path.name[5:]): path for path in folder.glob("seed-*") if re.fullmatch(r"seed-(0|[1-9]\d*)", path.name)}


def _complete(run: Run, scale: str, folder: Path) -> Run:
    """Set name, device, warm-up of statistics, and checkpoints to resume from."""
    hardware: dict[str, Any] = {"device": "cpu", "threads": 1} if scale == "pocket" else {"device": "cuda"}
    every = run.checkpoint_every or max(1, run.steps // 10)
    keep = max(run.average, 2)  # checkpoints of many runs fill a disk
    return dataclasses.replace(warm(run), name=str(folder), checkpoint_every=every, keep=keep, **hardware)
