"""One HTML page with tables and charts, which opens without a network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from normkit._util import write_whole
from normkit.watch import NOT_CHECKED, QUANTITIES, Recording, diagnose
from normkit.watch import read as read_rows
from normkit_papers import figures, results
from normkit_papers.report import charts, summary
from normkit_papers.report.recorded import Recorded, recorded
from normkit_papers.report.settings import Results
from normkit_papers.studies import table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN = ("device", "threads", "torch", "commit")  # of the environment of runs
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: auto; padding: 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
li { overflow-wrap: anywhere }
.wide { overflow-x: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
.charts > div { min-width: 0 }
table { border-collapse: collapse; font-size: 14px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; vertical-align: bottom }
td { white-space: nowrap }
select { font: inherit; max-width: 100% }
th:first-child, td:first-child { text-align: left }
pre { overflow-x: auto; background: #8882; padding: .6rem }
"""
SCRIPT = """
function show(select) {
  const section = select.closest("section"), plot = section.querySelector(".js-plotly-plot");
  section.querySelector("p").textContent = select.selectedOptions[0].title;
  Plotly.restyle(plot, {visible: plot.data.map(trace => trace.meta === select.value)});
}
// a chart is drawn before those beside it are there
addEventListener("load", () => dispatchEvent(new Event("resize")));
"""


class Page:
    """A page that grows section by section; `write` puts it into a file."""

    def __init__(self, title: str):
        self.title = title
        self.parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(f"<p>{escape(text)}</p>")

    def lines(self, texts: Iterable[str]) -> None:
        """Add sentences, as a list."""
        if items := "".join(f"<li>{escape(text)}</li>" for text in texts):
            self.parts.append(f"<ul>{items}</ul>")

    def table(self, cells: Sequence[Sequence[str]], heads: int = 1) -> None:
        """Add a table, whose first lines are headings."""
        lines = [
            "".join(
                f"<{'th' if place < heads else 'td'}>{escape(cell)}</{'th' if place < heads else 'td'}>"
                for cell in line
            )
            for place, line in enumerate(cells)
        ]
        self.parts.append(f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>')

    def chart(self, *figures: "Figure") -> None:
        """Add charts, beside each other where the screen is wide enough."""
        drawn = [each.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True}) for each in figures]
        if drawn:
            self.parts.append(f'<div class="charts">{"".join(drawn)}</div>')

    def choice(self, figure: "Figure", texts: Mapping[str, str]) -> None:
        """Add a chart that shows the traces of one `meta` at a time, and a menu of these with a text for each."""
        names = "".join(f'<option title="{escape(text)}">{escape(name)}</option>' for name, text in texts.items())
        menu = f'<select onchange="show(this)" aria-label="quantity">{names}</select>'
        self.parts.append(f"<section>{menu}<p>{escape(next(iter(texts.values())))}</p>")
        self.chart(figure)
        self.parts.append("</section>")

    def write(self, path: Path) -> Path:
        """Write the page; a browser needs no other file."""
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}{SCRIPT}</script>" if any("plotly" in part for part in self.parts) else ""
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        head += f"<title>{escape(self.title)}</title><style>{STYLE}</style>{script}"
        page = f"<!doctype html><html lang=en><head>{head}</head><body>"
        page += f"<h1>{escape(self.title)}</h1>{''.join(self.parts)}</body></html>\n"
        return write_whole(path, page.encode())


def add_runs(page: Page, found: Results) -> None:
    """Add table, conclusions, charts and findings of runs with their results."""
    runs = recorded(found)
    for kind, members in summary.groups(found).items():
        page.heading(kind)
        page.table(summary.cells(members))
        page.chart(*charts.folding(members))
    page.text(summary.about(found))
    page.heading("Losses")
    page.chart(*charts.losses(runs))
    add_recordings(page, runs)
    page.heading("Origin")
    machines = [{name: result["where"].get(name) for name in SHOWN} for result in found.values()]
    page.lines(dict.fromkeys(", ".join(f"{key} {value}" for key, value in each.items()) for each in machines))
    page.lines(dict.fromkeys(result["command"] for result in found.values() if result["command"]))


def add_recordings(page: Page, runs: Sequence[Recorded]) -> None:
    """Add the recorded statistics of runs, and the faults that they show."""
    runs = [run for run in runs if run.recording.quantities]
    if not runs:
        return
    page.heading("Statistics of the norms")
    figure, names = charts.recorded_statistics(runs)
    about = {name: QUANTITIES[name].definition if name in QUANTITIES else name for name in names}
    if names:
        texts = {name: f"{text[0].upper()}{text[1:]}. By step; {_line(runs, name)}." for name, text in about.items()}
        page.choice(figure, texts)
    page.heading("Findings")
    unchecked: dict[str, None] = {}
    for run in runs:
        found = diagnose(run.recording)
        unchecked |= dict.fromkeys(one.message for one in found if one.kind == NOT_CHECKED)
        faults = [f"{run.label}: {fault}" for fault in found.faults]
        page.lines(faults or [f"{run.label}: no fault in {len(found.checked)} checks"])
    if unchecked:
        page.lines(f"not checked: {message}" for message in unchecked)


def _line(runs: Sequence[Recorded], name: str) -> str:
    """Explain what a line of the chart of a quantity is."""
    of_norms = any(run.recording.sites[site] for run in runs for site in run.recording.of(name))
    if len(runs) > 1:
        return "a line is the median over the norms of a run" if of_norms else "a line is a run"
    return "a line is a norm" if of_norms else "the line is of the whole model"


def add_study(page: Page, made: table.Table, folders: Sequence[Path] = ()) -> None:
    """Add the table of a study and, of a figure, the drawing from its own runs."""
    page.heading(table.heading(made.study))
    page.table(table.grid(made), heads=2)
    page.lines(table.remarks(made))
    if made.study.id in figures.FIGURES and folders:
        try:
            page.chart(figures.draw(made.study.id, results.find(folders))[0])
        except ValueError as error:
            page.lines([f"not drawn: {error}"])


def make(paths: Sequence[Path], title: str) -> Page:
    """Make a page of runs in folders, and of files of recorded rows.

    Raises:
        ValueError: If a path does not exist or holds nothing of these.
    """
    page, rows = Page(title), [path for path in paths if path.suffix == ".csv" and not path.is_dir()]
    if folders := [path for path in paths if path not in rows]:
        add_runs(page, results.find(folders))
    loose = list[Recorded]()
    for path in rows:
        found = Recording(read_rows(path))
        if not found.quantities:
            raise ValueError(f"{path} has no rows; record some with normkit.record")
        label = path.absolute().parent.name if path.stem == "rows" else path.stem
        loose.append(Recorded(label, {"run": {}, "scores": {}}, found))
    add_recordings(page, loose)
    return page
