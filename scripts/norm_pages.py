"""Hook of the site: the navigation lists the pages of norms in the order of NORMS."""

from typing import Any

from normkit import NORMS


def on_config(config: Any) -> None:
    """Put the pages of the norms before those that the section lists already."""
    section = next(entry for entry in config.nav if "Norms" in entry)
    section["Norms"] = [{name: f"norms/{name}.md"} for name in NORMS] + section["Norms"]
