"""Tables of recipes and studies, by name, and which of them this machine can run."""

from normkit_papers.recipes import RECIPES
from normkit_papers.studies import tables
from normkit_papers.study import PAPERS, Study, expand
from normkit_papers.train.config import Run

STUDIES: dict[str, Study] = {study.id: study for study in tables.STUDIES}
"""By id."""

OF_PAPERS = tuple(name for name in STUDIES if name.partition(".")[0] in PAPERS)
"""Ids of the papers' tables and figures."""


def lacking(run: Run, whole: bool = False) -> str:
    """Explain which data of a run is missing or, with `whole`, incomplete; empty if none is."""
    from normkit_papers.data.corpora import CORPORA, locate
    from normkit_papers.train.source import source

    try:
        source(run)
    except ValueError as error:
        return str(error)
    except ImportError as error:
        return f"the package {error.name} is not installed"
    if whole and run.data in CORPORA and (part := locate(run.data).partial):
        return f"of the corpus {run.data} only a part is here ({part}); the rest is at {CORPORA[run.data].origin}"
    return ""


def recipe_rows() -> tuple[list[list[str]], dict[str, str]]:
    """List the recipes, which can run here, and why data is missing, by its name."""
    missing: dict[str, str] = {}
    lines = []
    for name, recipe in RECIPES.items():
        run = recipe()
        if why := lacking(run):
            missing[run.data] = why
        gpu = "GPU" in recipe.about and not _has_gpu()
        state = f"lacks {run.data}" if why else "needs a GPU" if gpu else "runs here"
        lines.append([name, state, recipe.about])
    return lines, missing


def study_rows() -> tuple[list[list[str]], dict[str, str]]:
    """List the studies with their scales and if these can run here; and why data is missing, by its name."""
    known: dict[tuple[str, str, str], str] = {}
    lines = []
    for name, study in STUDIES.items():
        scales: dict[str, list[str]] = {}  # by state
        for scale in study.scales:
            runs = {(scale, cell.run.task, cell.run.data): cell.run for cell in expand(study, scale)}
            for key in runs.keys() - known.keys():
                known[key] = lacking(runs[key], scale == "paper")
            absent = list(dict.fromkeys(key[2] for key in runs if known[key]))
            lacks = f"lacks {absent[0] if len(absent) == 1 else f'{len(absent)} data sets'}"
            state = (
                "runs here"
                if not absent
                else lacks
                if len(absent) == len({key[2] for key in runs})
                else f"in part, {lacks}"
            )
            scales.setdefault(state if scale == "pocket" or _has_gpu() else "needs a GPU", []).append(scale)
        states = "; ".join(f"{', '.join(names)}: {state}" for state, names in scales.items())
        lines.append([name, states or f"measured by {study.script.split()[1]}", study.title])
    return lines, {data: why for (_, _, data), why in known.items() if why}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
