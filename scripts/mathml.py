"""Hook of the site: formulas become MathML when a page is built.

Pages then need no script to show them.
"""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Replace every formula that `pymdownx.arithmatex` marked."""
    return FORMULA.sub(lambda m: convert(html.unescape(m[3]), display="inline" if m[2] == "(" else "block"), content)
