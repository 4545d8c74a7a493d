"""Record statistics of a model's norms while it trains."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from normkit.watch.recorder import Loss, Recorder
from normkit.watch.rows import Rows, Sink


@contextmanager
def record(
    model: nn.Module,
    every: int = 25,
    quantities: str | Iterable[str] | None = None,
    *,
    loss: Loss = None,
    to: Sink = None,
    keep: int = 200_000,
) -> Iterator[Rows]:
    """Record statistics of the norms of a model while it trains; the training does not change.

    All norms are measured, those of other libraries too. For a norm without running statistics the recorder keeps the
    ones that batch statistics would have there. Of several processes the first one records, its own share of the batch
    (all of it for a norm with `sync=True`). Start before the first forward of a model that is compiled.

    Args:
        model: Any model with norms.
        every: Training forwards from one measurement to the next; 25 keeps the cost below 3 % of most steps.
        quantities: Names from `normkit.watch.QUANTITIES`, "default" (all but the expensive ones) or "all".
        loss: The module that the loop calls, such as `nn.CrossEntropyLoss()`: its outputs in training are recorded, and
            what a constant prediction would reach (also of `nn.NLLLoss`, `nn.MSELoss`, `nn.BCELoss`,
            `nn.BCEWithLogitsLoss`; not if it is called twice a step), without which some faults cannot be seen. Or a
            function without arguments that returns the loss of the last step: `lambda: loss`. A model whose output has
            a `loss`, as in transformers, needs neither.
        to: CSV file that rows are appended to, or a function that takes them; see `Rows`.
        keep: Number of rows of norms held in memory, the newest ones; those of the whole model all stay.

    Yields:
        The rows recorded so far.

    Raises:
        TypeError: if `model` is no `nn.Module`, or `to` neither path nor function.
        ValueError: for an unknown quantity, a value out of range, a model without norms or sharded by FSDP2, or a file
            `to` that has rows.

    Examples:
        >>> import normkit, torch
        >>> model = nn.Sequential(nn.Linear(4, 4), normkit.make("pnv", 4))
        >>> with record(model, every=1, quantities=["distance_quadratic"]) as rows:
        ...     _ = model(torch.ones(3, 4)), model(torch.ones(3, 4))
        >>> [(row.step, row.site, row.quantity) for row in rows]
        [(1, '1', 'distance_quadratic'), (2, '1', 'distance_quadratic')]
    """
    if isinstance(to, str | Path) and Path(to).is_file() and Path(to).stat().st_size:
        raise ValueError(f"{to} has rows of an earlier run; delete it, or name another file")
    recorder = Recorder(model, every, quantities, loss=loss, to=to, keep=keep)
    try:
        recorder.follow()
        yield recorder.rows
    except BaseException:
        recorder.read_loss = None  # the last step may have none
        recorder.close(warns=False)
        raise
    recorder.close()
