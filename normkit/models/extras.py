"""Packages that only some transforms need, and the extras of normkit that install them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Let the ImportError of a package name the extra of normkit that installs it."""
    try:
        yield
    except ImportError as missing:
        raise ImportError(f"{what} needs {missing.name}; pip install 'normkit[{extra}]'") from missing
