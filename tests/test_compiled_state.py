"""State of compiled norms whose forwards and backwards do not take turns."""

import copy

import pytest
import torch

from normkit.norms import make


@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize(
    "spec", ["power(groups=0, warmup=0)", "un(outlier_filtration=True, window=2, warmup=2)", "un(window=2)"]
)
def test_two_forwards_before_one_backward(spec):
    """State is read in the backward that changes it, not in the forward before."""
    eager = make(spec, 2)
    norm = copy.deepcopy(eager)
    compiled = torch.compile(norm, backend="aot_eager_decomp_partition")
    for _ in range(4):
        a, b = torch.randn(2, 6, 2)
        for forward in (eager, compiled):
            (forward(a).square().sum() + 3 * forward(b).square().sum()).backward()
    torch.testing.assert_close(dict(norm.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)
