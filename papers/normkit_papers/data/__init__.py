"""Real data to learn from: readers, vocabularies, batches."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normkit_papers.data.vocab import Vocab

OnStage = Callable[[str], object]
"""Called with each stage of reading, such as "reading cifar10"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """A data set that has been read: splits, whose type a subclass names, and the vocabularies of a model."""

    name: str
    train: Any
    valid: Any
    test: Any
    vocabularies: "dict[str, Vocab]"
