"""After a study: similarity of its models' layers with those of its first row."""

from pathlib import Path

from normkit.watch.rows import FILE, Appender, read_run
from normkit_papers import results
from normkit_papers.cka import cka
from normkit_papers.study import Study, expand, seeds
from normkit_papers.train.folder import load
from normkit_papers.train.source import open_task

LAYERS = ("*norm1", "*norm2", "*final_norm", "*.out", "*.outer", "*.attn.proj", "*.mlp.fc2")
"""Norms, attention and feed-forward blocks of T2T-ViT."""
IMAGES, BATCH = 1000, 125


def add_similarity(study: Study, scale: str, out: Path) -> None:
    """Measure CKA on test images where it is missing, and append it to the rows of each run.

    Models of the same seed are compared (UN, Figure 6).
    """
    folders = dict.fromkeys(cell.folder for cell in expand(study, scale))
    first = next(cell.folder for cell in expand(study, scale) if cell.row == 0)
    references = {seed: folder for seed, folder in seeds(out / first).items() if _is_done(folder)}
    for path in folders:
        for seed, folder in seeds(out / path).items():
            if seed in references and _is_done(folder) and "cka" not in read_run(folder).quantities:
                reference, other = load(references[seed]), load(folder)
                images = open_task(other).test_images(IMAGES, BATCH)
                found = cka(reference.model, other.model, images, LAYERS)
                Appender(folder / FILE)(found.rows(other.run.steps))


def _is_done(folder: Path) -> bool:
    return (folder / results.FILE).is_file() and results.read(folder)["status"] == "done"
