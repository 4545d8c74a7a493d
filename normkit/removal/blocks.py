"""Train a model without norms block by block, each towards the original's block."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models import calibrate, find
from normkit.models.fit import fit_like
from normkit.models.invoke import Forward, call
from normkit.norms import StatNorm
from normkit.removal.budget import block_of
from normkit.removal.distill import train
from normkit.removal.large_tokens import place_of

FITTED = 8  # batches that norms outside of blocks are fitted to
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")  # arguments of a block that a call changes


class BlockRow(NamedTuple):
    """A batch where it enters a block.

    Attributes:
        theirs: The stream of the original, `[batch, time, channels]`.
        mine: That of the model without norms.
        args: Further arguments of the block.
        kwargs: Its keywords.
        wanted: What the original's block returns.
    """

    theirs: Tensor
    mine: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    wanted: Tensor

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        """What a block makes of a stream."""
        kwargs = {key: copy.deepcopy(value) if key in CACHES else value for key, value in self.kwargs.items()}
        found = block(x, *self.args, **kwargs)
        return found[0] if isinstance(found, tuple) else found


@torch.no_grad()
def blocks_of(model: nn.Module, batch: Any, forward: Forward | None = None) -> list[str]:
    """Return the names of the blocks with norms, if each reads what the one before returns.

    >>> blocks_of(nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2)), torch.ones(1, 2))
    ['0', '1']
    >>> blocks_of(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)), torch.ones(1, 2))
    []
    """
    blocks = dict.fromkeys(block_of(place_of(model, name)) for name in find(model))
    names = [name for name in blocks if name.rpartition(".")[2].isdigit()]
    read: list[Any] = []
    returned: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        read.append(args[0] if args else kwargs.get("hidden_states"))
        returned.append(y[0] if isinstance(y, tuple) else y)

    with contextlib.ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(note, with_kwargs=True))
        call(model, batch, forward)
    follow = all(isinstance(x, Tensor) and torch.equal(x, y) for x, y in zip(read[1:], returned, strict=False))
    return names if follow and len(read) == len(names) and all(isinstance(x, Tensor) for x in read) else []


def train_blocks(
    model: nn.Module,
    original: nn.Module,
    batches: Sequence[Any],
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    forward: Forward | None = None,
    checkpoint: Path | None = None,
    on_step: Callable[[int, int], object] | None = None,
) -> None:
    """Fit and train each block towards that of the original, in place, first to last.

    A block reads what the blocks before it return, which are trained already, so it also corrects part of their error.
    The error of a token is relative to its size, in channels weighted as the norms behind read them: the few large
    tokens and channels of a language model would hide the others.

    Args:
        model: The model without norms; those of its blocks are norms with frozen statistics.
        original: The original.
        batches: Inputs of the models. Two streams of all of them are in memory.
        steps: Steps of each block.
        lr: Highest learning rate.
        seed: Seed of the order of batches.
        forward: Called as `forward(model, batch)` in place of a model.
        checkpoint: File that is written after each block. If it exists, training continues behind its last one.
        on_step: Called as `on_step(step, steps of all blocks)`.

    Raises:
        ValueError: If a loss is not finite.
    """
    names, done = blocks_of(original, batches[0], forward), 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        done = saved["blocks"]
    entries = [_entry(original, names, batch, forward) for batch in batches]
    theirs = [stream for stream, _ in entries]
    mine = [_entry(model, names[:1], batch, forward)[0] for batch in batches]
    for number, name in enumerate(names):
        block, teacher = model.get_submodule(name), original.get_submodule(name)
        weights = _read_weights(original, names, number, theirs[0].shape[-1]).to(theirs[0])
        rows = []
        for (_, calls), x, y in zip(entries, theirs, mine, strict=True):
            row = BlockRow(x, y, *calls[number], x)
            with torch.no_grad():
                rows.append(row._replace(wanted=row.through(teacher, x)))

        def loss(block: nn.Module, row: BlockRow, weights: Tensor = weights) -> Tensor:
            error = weights * (row.through(block, row.mine) - row.wanted).square()
            return (error.sum(-1) / (weights * row.wanted.square()).sum(-1)).log1p().mean()

        if number >= done:
            _fit(block, teacher, rows)
            train(
                block, loss, _shuffled(rows, seed + number), steps=steps, lr=lr,
                on_step=lambda step, _, at=number: on_step and on_step(at * steps + step, len(names) * steps),
            )  # fmt: skip
            if checkpoint is not None:
                new = checkpoint.with_suffix(".new")
                torch.save({"model": model.state_dict(), "blocks": number + 1}, new)
                new.replace(checkpoint)
        with torch.no_grad():
            mine, theirs = [row.through(block, row.mine) for row in rows], [row.wanted for row in rows]
    norms = ((name, norm) for name, norm in model.named_modules() if isinstance(norm, StatNorm))
    outside = {name: norm for name, norm in norms if block_of(name) not in names}
    with torch.no_grad():
        fit_like(model, outside, original, batches[:FITTED], forward, None)


def _fit(block: nn.Module, teacher: nn.Module, rows: Sequence[BlockRow]) -> None:
    """Fit the norms of a block to those of the original's, each on its own stream."""

    def forward(which: nn.Module, row: BlockRow) -> Tensor:  # it gets copies of both
        new = any(isinstance(module, StatNorm) for module in which.modules())
        return row.through(which, row.mine if new else row.theirs)

    if find(teacher):
        calibrate(block, rows, like=teacher, forward=forward, inplace=True)


@torch.no_grad()
def _entry(
    model: nn.Module, names: Sequence[str], batch: Any, forward: Forward | None
) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return what enters the first block, and the further arguments of each block."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    first: list[Tensor] = []
    caches: dict[str, Any] = {}  # as they are before the first block

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        stream = args[0] if args else kwargs.pop("hidden_states")
        if not first:
            first.append(stream)
            caches.update({key: copy.deepcopy(kwargs[key]) for key in CACHES if key in kwargs})
        calls.append((args[1:], {**kwargs, **{key: value for key, value in caches.items() if key in kwargs}}))

    with contextlib.ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
        call(model, batch, forward)
    return first[0], calls


def _read_weights(model: nn.Module, names: Sequence[str], number: int, dim: int) -> Tensor:
    """Return the mean weight `[dim]` with which the norms behind a block read squares of the stream."""
    behind = [norm for name, norm in find(model).items() if block_of(name) not in names[: number + 1]]
    gains = [norm.weight.detach() for norm in behind if norm.weight is not None and norm.weight.numel() == dim]
    squares = [gain.float().square() / gain.float().square().mean() for gain in gains]
    return torch.stack(squares).mean(0) if squares else torch.ones(dim)


def _shuffled(rows: Sequence[BlockRow], seed: int) -> Iterator[BlockRow]:
    chance = random.Random(seed)
    while True:
        yield from chance.sample(rows, len(rows))
