"""After a study: similarity of its models' layers with those of its first row."""

from pathlib import Path

from normkit.watch.row_files import FILE, Appender, read_run
from normkit_papers.cka import cka
from normkit_papers.report import results
from normkit_papers.study import Study, expand, seeds, unique
from normkit_papers.train.folder import load
from normkit_papers.train.source import open_task

LAYERS = ("*norm*", "*.out", "*.outer")  # norms, attention and feed-forward blocks of our vision models
IMAGES, BATCH = 1000, 125


def add_similarity(study: Study, scale: str, out: Path) -> None:
    """Measure CKA on test images where it is missing, and append it to the rows of each run.

    Models of the same seed are compared (UN, Figure 6).
    """
    cells = unique(expand(study, scale))
    first = next(cell for cell in cells if cell.row == 0)
    references = {seed: folder for seed, folder in seeds(out / first.folder).items() if _done(folder)}
    for cell in cells:
        for seed, folder in seeds(out / cell.folder).items():
            if seed in references and _done(folder) and "cka" not in read_run(folder).quantities:
                reference, other = load(references[seed]), load(folder)
                images = open_task(other).test_images(IMAGES, BATCH)
                found = cka(reference.model, images, other.model, LAYERS)
                Appender(folder / FILE)(found.rows(other.run.steps))


def _done(folder: Path) -> bool:
    return (folder / results.FILE).is_file() and results.read(folder)["status"] == "done"
