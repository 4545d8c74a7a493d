"""One thread and fixed seeds.

Uninitialized memory is NaN, so that tests fail if it is read.
"""

import gc
import pathlib

import pytest
import torch

SHARED = pathlib.Path(__file__).parents[1] / "shared" / "data"


def pytest_configure():
    """Fill fresh memory with NaN, count on one thread, and collect garbage seldom."""
    gc.set_threshold(100_000, 50, 100)  # that of Python, 700, takes a tenth of the time
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(8).isnan().all(), "this torch no longer fills fresh memory: find another way to poison it"


def pytest_collection_modifyitems(items):
    """Run slow tests first, so that both processes end together; skip what cannot run here."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("shared") and not SHARED.is_dir():
            item.add_marker(pytest.mark.skip(reason="the data sets are not beside the checkout"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
