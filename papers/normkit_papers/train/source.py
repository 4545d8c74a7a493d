"""Find the data of a run by its name and its task, and return a function that reads it."""

import functools
from collections.abc import Callable
from typing import Any

from normkit._util import pick, require
from normkit_papers.data import OnStage
from normkit_papers.data.corpora import locate
from normkit_papers.data.embedded import SOURCES, reader
from normkit_papers.data.images import find_images, read_images
from normkit_papers.data.prepare import prepare
from normkit_papers.data.scenes import find_scenes
from normkit_papers.tasks import TASKS
from normkit_papers.train.config import DetectionRun, ImageRun, LanguageRun, Run, TranslationRun
from normkit_papers.train.folder import Loaded, check_vocabularies

Reader = Callable[[], Any]


def source(run: Run, on_stage: OnStage = lambda stage: None) -> Reader:
    """Find the data of a run; the function that is returned reads it.

    Raises:
        ValueError: If the data is missing or of a kind that the task cannot train on. Nothing has been read then.
    """
    return pick(TASKS, run.task, "task").load("data")(run, on_stage)


def open_task(loaded: Loaded) -> Any:
    """Return the task of a trained model, with its data.

    Raises:
        ValueError: If the data is missing, or has other words or classes than the model was trained with.
    """
    run, model, vocabularies = loaded
    data = source(run)()
    check_vocabularies(run.name, vocabularies, data.vocabularies)
    return TASKS[run.task].load("module")(run, model, data)


def sequences(run: Run, on_stage: OnStage) -> Reader:
    """Find an embedded data set, or a folder of sequences."""
    if run.task == "digits":
        require(run.data == "digits", "data", run.data, "digits for task digits")
    else:
        require(run.data not in ("digits", "pydoc"), "data", run.data, "cmudict or a folder for task g2p")
    return reader(run.data)


def corpus(run: TranslationRun | LanguageRun, on_stage: OnStage) -> Reader:
    """Find a corpus of parallel text for task mt, else of running text, or a folder of it."""
    kind = "parallel" if run.task == "mt" else "text"
    if run.data in SOURCES:
        require(run.data == "pydoc" and run.task == "lm", "data", run.data, f"a corpus for {run.task}")
        require(not run.subwords, "subwords", run.subwords, f"0 for {run.data}, which has no files to learn them from")
        return reader(run.data)
    located = locate(run.data)
    if located.corpus.kind != kind:
        raise ValueError(f"{run.data} is a corpus of kind {located.corpus.kind}; task {run.task} needs kind {kind}")
    return functools.partial(prepare, located, subwords=run.subwords, share=run.model.share, on_stage=on_stage)


def images(run: ImageRun, on_stage: OnStage) -> Reader:
    """Find a data set of images with classes, or a folder of images."""
    find_images(run.data)
    return functools.partial(read_images, run.data, held_out=run.images.held_out, on_stage=on_stage)


def annotated_images(run: DetectionRun, on_stage: OnStage) -> Reader:
    """Find a data set of images with boxes, or a folder of them."""
    return find_scenes(run.data)
