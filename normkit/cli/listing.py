"""`normkit list`: what there is."""

import textwrap

from normkit.cli.line import parse_arguments, write
from normkit.norms import NORMS, StatNorm, make, options


def list_(arguments: list[str]) -> int:
    """All norms with their options, recipes, and sources of data."""

    def parse() -> None:
        """Show all norms with their options and defaults, the recipes of `normkit train`, and the sources of data."""

    if arguments:  # where there are none, torch is all that this command needs
        parse_arguments(parse, arguments, "list")
    from normkit.lab.data.corpora import CORPORA
    from normkit.lab.data.embedded import SOURCES
    from normkit.lab.data.image_sets import IMAGE_SETS
    from normkit.lab.studies.catalogue import RECIPES

    lines = ["Norms: a spec is a name, or a name with options as in 'un(window=8)'", ""]
    everywhere = options("layer")
    for name, kind in NORMS.items():
        offline, stat, own = make(name, 16).offline, issubclass(kind, StatNorm), options(name)
        kept = "stays at inference"
        if offline or (stat and "groups" in own) or "until" in own:
            kept = f"folds away {'at inference' if offline else 'with groups=0' if stat else 'after its schedule'}"
        what = f"{'statistics of batches' if stat else 'each token by itself'}, {kept}"
        own = ", ".join(
            f"{key}={value!r}" for key, value in options(name).items() if (key, value) not in everywhere.items()
        )
        lines.append(f"  {name:<8} {kind.__name__}: {what}")
        lines += textwrap.wrap(own, 110, initial_indent=" " * 11, subsequent_indent=" " * 11)
    common = ", ".join(f"{key}={value!r}" for key, value in everywhere.items())
    lines.append(f"  all of them, unless they say otherwise: {common}")
    lines += ["", "Recipes (normkit train RECIPE)", ""]
    lines += [f"  {name:<13} {str(recipe.__doc__).splitlines()[0]}" for name, recipe in RECIPES.items()]
    lines += ["", "Sources of data, none needs a download", ""]
    lines += [f"  {name:<13} {str(source.__doc__).splitlines()[0]}" for name, source in SOURCES.items()]
    lines += ["", "Corpora, found through NORMKIT_DATA", ""]
    lines += [f"  {name:<15} {corpus.here()}" for name, corpus in CORPORA.items()]
    lines += ["", "Pictures, found through NORMKIT_DATA", ""]
    lines += [f"  {name:<15} {row.here()}" for name, row in IMAGE_SETS.items()]
    write("\n".join(lines))
    return 0
