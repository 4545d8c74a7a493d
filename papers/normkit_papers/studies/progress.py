"""Progress of several runs: live bars in a terminal, occasional lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from normkit_papers.studies.workers import interrupted_after
from normkit_papers.train.distributed_env import is_rank_zero
from normkit_papers.train.progress import Progress


class Board:
    """Display of runs: `with Board(console, titles, steps) as b: b.update(title, progress)`."""

    def __init__(self, console: Console, titles: list[str], steps: int):
        self.console = console if is_rank_zero() else Console(quiet=True)  # only rank 0 prints
        self.titles, self.steps = titles, steps
        self.started = time.monotonic()
        self._printed: dict[str, float] = {}
        self._live: Bars | None = None
        self._rows: dict[str, Any] = {}

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            title, state = (TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[state]}"))
            self._live = Bars(title, BarColumn(bar_width=24), state, console=self.console, refresh_per_second=5)
            self._live.start()
            self._rows = {title: self._live.add_task(title, total=self.steps, state="waiting") for title in self.titles}
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, title: str, progress: Progress) -> None:
        """Show the progress of a run; without a terminal, a line per tenth and per later stage."""
        step, steps, training = progress.step, progress.steps, progress.stage == "training"
        state = f"{progress.stage} ..."
        if training:
            state = f"step {step:,} of {steps:,}   loss {progress.loss:.3f}"
        if progress.seconds_left is not None:
            state += f"   {progress.tokens_per_s:,.0f} {progress.unit}/s   {clock(progress.seconds_left)} left"
        tenth = step == steps or step / steps - self._printed.get(title, -1.0) >= 0.1
        if self._live is not None or tenth or not training:
            self._printed[title] = step / steps
            self._show(title, state, total=steps, completed=step)

    def end(self, title: str, outcome: str) -> None:
        """Show the outcome of a run."""
        self._show(title, outcome)

    def print(self, text: str) -> None:
        """Print a line that concerns no single run."""
        with interrupted_after():
            (self._live.console if self._live is not None else self.console).print(text, markup=False, highlight=False)

    def _show(self, title: str, state: str, **bar: Any) -> None:
        with interrupted_after():
            if self._live is not None:
                self._live.update(self._rows[title], state=state, **bar)
            else:
                text = f"[{clock(time.monotonic() - self.started)}] {title}: {state}"
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> clock(75)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
