"""Progress of several runs at once: live bars in a terminal, a line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from normkit.lab.train.distributed_env import first
from normkit.lab.train.progress import Progress


class Board:
    """Shows how far each of several runs is; `with Board(console, titles, steps) as board: board.tell(title, tick)`."""

    def __init__(self, console: Console, titles: list[str], steps: int):
        self.console = console if first() else Console(quiet=True)  # of the processes of a run the first speaks
        self.titles, self.steps = titles, steps
        self.started = time.monotonic()
        self._said: dict[str, float] = {}
        self._live: Bars | None = None
        self._rows: dict[str, Any] = {}

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[state]}"),
            )
            self._live = Bars(*columns, console=self.console, refresh_per_second=5)
            self._live.start()
            self._rows = {title: self._live.add_task(title, total=self.steps, state="waiting") for title in self.titles}
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, title: str, tick: Progress) -> None:
        """Show where a run is."""
        if tick.stage != "training":
            state = f"{tick.stage} ..."
        else:
            state = (
                f"step {tick.step:,} of {tick.steps:,}   loss {tick.loss:.3f}   "
                f"{tick.tokens_per_s:,.0f} {tick.unit}/s   {clock(tick.seconds_left)} left"
            )
        if self._live is not None:
            self._live.update(self._rows[title], total=tick.steps, completed=tick.step, state=state)
            return
        part = tick.step / tick.steps  # elsewhere: each tenth of the training, and each further stage, on a line
        if tick.stage != "training" or part - self._said.get(title, -1.0) >= 0.1 or part == 1:
            self._said[title] = part
            self._line(f"{title}: {state}")

    def end(self, title: str, outcome: str) -> None:
        """Show how a run ended."""
        if self._live is not None:
            self._live.update(self._rows[title], state=outcome)
        else:
            self._line(f"{title}: {outcome}")

    def say(self, text: str) -> None:
        """A line about no run in particular."""
        (self._live.console if self._live is not None else self.console).print(text, markup=False, highlight=False)

    def _line(self, text: str) -> None:
        self.console.print(
            f"[{clock(time.monotonic() - self.started)}] {text}", markup=False, highlight=False, soft_wrap=True
        )


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> clock(75)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
