"""Tables of recipes and studies, by name."""

import inspect
from collections.abc import Callable

from normkit._util import align
from normkit_papers import recipes
from normkit_papers.powernorm import language_models
from normkit_papers.powernorm import recipes as power_recipes
from normkit_papers.powernorm import tables as power
from normkit_papers.studies import bucketing, core, warmup
from normkit_papers.study import Study
from normkit_papers.tears import recipes as tears_recipes
from normkit_papers.tears import tables as tears
from normkit_papers.train.config import Run
from normkit_papers.unified import detectors
from normkit_papers.unified import recipes as unified_recipes
from normkit_papers.unified import tables as unified

RECIPES: dict[str, Callable[[], Run]] = {
    name: function
    for module in (recipes, power_recipes, language_models, tears_recipes, unified_recipes, detectors)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
"""By name: the public functions of these modules."""

STUDIES: dict[str, Study] = {
    study.id: study
    for module in (power, tears, unified, core, warmup, bucketing)
    for value in vars(module).values()
    for study in (value if isinstance(value, tuple) else (value,))
    if isinstance(study, Study)
}
"""By id: the studies that these modules define, one by one or in tuples."""


def listing() -> str:
    """List all studies, one a line, with the scales at which they can be run."""
    rows = [
        (name, f"{study.title} [{', '.join(study.scales) or 'not measured yet'}]") for name, study in STUDIES.items()
    ]
    return align(rows)
