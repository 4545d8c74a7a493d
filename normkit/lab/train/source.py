"""The data of a run, by its name and its task."""

import functools
from collections.abc import Callable
from typing import Any

from normkit.lab.data.corpora import CORPORA, locate
from normkit.lab.data.embedded import SOURCES
from normkit.lab.data.image_sets import IMAGE_SETS, find_images
from normkit.lab.data.images import read_images
from normkit.lab.data.prepare import prepare
from normkit.lab.data.scenes import find_scenes
from normkit.lab.data.text import reader
from normkit.lab.train.config import Run

KINDS = {"mt": "parallel", "lm": "text"}
"""Of corpora, by the task that is trained on them."""


def source(run: Run, tell: Callable[[str], object]) -> Callable[[], Any]:
    """How to read the data of a run; `tell` hears how far that is.

    Detection takes rows of SCENE_SETS and folders of pictures with boxes, classifiers rows of IMAGE_SETS and
    folders of pictures, translation of text and language models corpora of the table and folders of text, the others
    what `reader` knows. ValueError, before anything is read, where there is no such data, or where the task does not
    fit it.
    """
    if run.task == "images":
        find_images(run.data)
        return functools.partial(
            read_images, run.data, held_out=run.images.held_out, refuse=run.broken == "refuse", tell=tell
        )
    if run.data in IMAGE_SETS:
        raise ValueError(f"{run.data} is pictures; task {run.task} cannot learn from that")
    if run.task == "detection":
        return find_scenes(run.data, run.broken)
    kind = KINDS.get(run.task)
    if kind is None or run.data in SOURCES:
        if run.data in CORPORA:
            raise ValueError(f"{run.data} is {CORPORA[run.data].kind}; task {run.task} cannot learn from that")
        return reader(run.data)
    located = locate(run.data)
    if located.corpus.kind != kind:
        raise ValueError(f"{run.data} is {located.corpus.kind}, where task {run.task} needs {kind}")
    return functools.partial(prepare, located, subwords=run.subwords, share=run.model.share, tell=tell)
