"""For the site: doctests in docstrings become blocks of code, wherever they stand."""

import re

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Put a fence around every doctest: from its first prompt to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each object that Griffe has read."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
