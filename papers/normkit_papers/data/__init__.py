"""Real data to learn from: readers, vocabularies, batches."""

from collections.abc import Callable

OnStage = Callable[[str], object]
"""Called with each stage of reading, such as "reading cifar10"."""
