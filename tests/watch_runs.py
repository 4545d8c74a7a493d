"""Some forty small runs of known fate, by which the thresholds of `diagnose` are held from both sides.

`python tests/watch_runs.py` trains them, in five minutes on one core, and writes tests/data/watch_runs.csv: rows of
three norms of each run, a line a step, a column a quantity. The models are byte models of twelve layers.
"""

import contextlib
import csv
import io
import math
import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit
from normkit.watch import Row
from normkit.watch.diagnose import CHECKS

FILE = Path(__file__).parent / "data" / "watch_runs.csv"
WIDTH, DEPTH, LENGTH, BATCH, STEPS, EVERY = 32, 12, 32, 16, 150, 25
NEEDED = {name for check in CHECKS for name in check.needs.split()} | {"rms"}
KEPT = sorted(NEEDED | {"constant_loss", "overflow", "skipped", "skipped_grad", "gap_quadratic", "gap_batch"})


class Fate(NamedTuple):
    """A run, and the kind of the finding that names its fault; "" for a healthy one."""

    kind: str
    lr: float
    pre: bool = True
    norm: str = "layer"
    trick: str = ""
    seed: int = 0

    def fits(self, found: set[str]) -> bool:
        """True if the kinds found name the fault, or nothing was found in a healthy run."""
        return self.kind in found if self.kind else not found


RUNS = {
    **{f"pre {lr:g}": Fate("", lr) for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)},
    **{f"pre 0.01, seed {seed}": Fate("", 1e-2, seed=seed) for seed in (1, 2)},
    **{f"post {lr:g}": Fate("", lr, pre=False) for lr in (3e-4, 1e-3, 2e-3, 3e-3)},
    **{f"pre {norm}": Fate("", 3e-3, norm=norm) for norm in ("rms", "un(warmup=20)", "power(warmup=20)")},
    **{f"post {norm}": Fate("", 1e-3, False, norm) for norm in ("rms", "un(warmup=20)", "power(warmup=20)")},
    "bfloat16": Fate("", 3e-3, trick="bfloat16"),
    "float16": Fate("", 1e-3, trick="float16"),
    "a rare token is large": Fate("", 1e-3, trick="rare"),
    **{f"collapse, seed {seed}": Fate("collapsed tokens", 1e-2, pre=False, seed=seed) for seed in (0, 1)},
    **{f"collapse {lr:g}": Fate("collapsed tokens", lr, pre=False) for lr in (5e-3, 3e-2)},
    **{f"explosion {lr:g}": Fate("exploding", lr) for lr in (0.1, 0.3, 1.0)},
    "late explosion": Fate("exploding", 1e-3, trick="late"),
    **{f"too small a rate, pre={pre}": Fate("loss", 1e-7, pre=pre) for pre in (True, False)},
    **{f"targets of other inputs {lr:g}": Fate("loss", lr, trick="shuffled") for lr in (1e-3, 3e-3)},
    **{f"overflow of {trick}": Fate("overflow", 1e-3, trick=trick) for trick in ("half", "large float16")},
    **{f"dead channel, {norm}": Fate("dead channels", 3e-3, norm=norm, trick="dead") for norm in ("layer", "rms")},
    "large first token, layer": Fate("outlier tokens", 3e-3, trick="first"),
    "large first token, rms": Fate("outlier tokens", 3e-3, norm="rms", trick="first"),
    "large first token, un": Fate("large tokens", 3e-3, norm="un(warmup=20)", trick="first"),
    **{f"nan batch, {norm}": Fate("nan", 3e-3, norm=norm, trick="nan") for norm in ("layer", "un(warmup=20)")},
    "gradient spike": Fate("gradient spikes", 3e-3, trick="spike"),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, pre: bool):
        super().__init__()
        self.pre, self.first, self.second = pre, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attend(self.first(x))
            return x + self.feed(self.second(x))
        x = self.first(x + self.attend(x))
        return self.second(x + self.feed(x))


class Bytes(nn.Module):
    def __init__(self, pre: bool, trick: str):
        super().__init__()
        self.trick, self.is_nan = trick, False
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(pre) for _ in range(DEPTH))
        self.norm, self.out = nn.LayerNorm(WIDTH) if pre else nn.Identity(), nn.Linear(WIDTH, 256)
        with torch.no_grad():
            if trick == "rare":
                self.embed.weight[ord("Q")] *= 100
            if trick == "first":
                self.places[0] += 100
            if trick in ("half", "large float16"):
                self.blocks[DEPTH // 2].feed[2].weight *= 1e6

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        if self.is_nan:
            x = x * torch.nan
        for block in self.blocks:
            if self.trick == "dead":
                x = x * (torch.arange(WIDTH) != 3)
            x = block(x)
        return self.out(self.norm(x))


def train(fate: Fate) -> list[Row]:
    """Train a model; the rows of its first, middle and last norm."""
    torch.manual_seed(fate.seed)
    text = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    trick, draw = fate.trick, torch.Generator().manual_seed(fate.seed)
    model = normkit.convert(Bytes(fate.pre, trick), fate.norm)
    model = model.half() if trick == "half" else model
    optimizer, criterion = torch.optim.AdamW(model.parameters(), fate.lr), nn.CrossEntropyLoss()
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "large float16": torch.float16}
    low = torch.autocast("cpu", kinds[trick]) if trick in kinds else contextlib.nullcontext()
    with normkit.record(model, EVERY, loss=criterion) as rows:
        for step in range(STEPS):
            ids = text[torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)]
            targets = ids[:, 1:].flatten()
            if trick == "shuffled":
                targets = targets[torch.randperm(len(targets), generator=draw)]
            if trick == "late" and step == STEPS // 2:
                optimizer.param_groups[0]["lr"] *= 1000
            model.is_nan = trick == "nan" and step == 3 * EVERY
            optimizer.zero_grad()
            with low:
                loss = criterion(model(ids[:, :-1]).flatten(0, 1).float(), targets)
            (loss * (1000 if trick == "spike" and step == 5 * EVERY else 1)).backward()
            if not (model.is_nan or (trick == "spike" and step == 5 * EVERY)):
                optimizer.step()
    sites = list(dict.fromkeys(row.site for row in rows if row.quantity == "rms"))
    chosen = {"", sites[0], sites[len(sites) // 2], sites[-1]}
    return [row for row in rows if row.site in chosen and row.quantity in KEPT]


def read() -> dict[str, list[Row]]:
    """The kept rows of each run."""
    found: dict[str, list[Row]] = {name: [] for name in RUNS}
    with FILE.open(encoding="utf8", newline="") as file:
        for line in csv.DictReader(file):
            run, step, site, norm = (line.pop(name) for name in ("run", "step", "site", "norm"))
            found[run] += [Row(int(step), site, norm, name, float(value)) for name, value in line.items() if value]
    return found


def lines(name: str, rows: list[Row]) -> Iterator[list[object]]:
    """The lines of a run in the file, in the order of its steps and sites."""
    keys = dict.fromkeys(row[:3] for row in rows)
    values = {(row[:3], row.quantity): f"{row.value:.4g}" for row in rows}
    for key in sorted(keys, key=lambda key: key[0]):
        yield [name, *key, *(values.get((key, quantity), "") for quantity in KEPT)]


def main() -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "step", "site", "norm", *KEPT])
    for name, fate in RUNS.items():
        rows = train(fate)
        writer.writerows(lines(name, rows))
        found = {finding.kind for finding in normkit.diagnose(rows)} - {"not checked"}
        loss = [row.value for row in rows if row.quantity == "loss"][-1]
        sys.stderr.write(f"{'right' if fate.fits(found) else 'WRONG'} {name}: {loss:.3f} {sorted(found)}\n")
        assert math.isfinite(loss) or fate.kind
    FILE.write_text(out.getvalue(), encoding="utf8")


if __name__ == "__main__":
    main()
