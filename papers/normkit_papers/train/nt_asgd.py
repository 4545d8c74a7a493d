"""NT-ASGD (Merity et al. 2018): SGD that averages once validation stops improving."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

NEVER = 2.0**62  # step at which averaging starts, until it is known
INTERVAL = 5  # validations that may be worse than an earlier one, as in the paper


class NTASGD(torch.optim.ASGD):
    """`torch.optim.ASGD` whose averaging starts by a rule (Algorithm 1).

    Call `validated(losses)` after each validation. The checkpoint of the optimizer holds the start and the average.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> optimizer = NTASGD([weight], lr=1.0)
    >>> optimizer.validated([3.0, 2.0, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1]), optimizer.averages
    (True, True)
    """

    def __init__(self, groups: Iterable[Any], lr: float):
        super().__init__(groups, lr=lr, lambd=0.0, t0=NEVER)

    @property
    def averages(self) -> bool:
        """True if averaging has started."""
        return self.param_groups[0]["t0"] < NEVER

    def validated(self, losses: Sequence[float]) -> bool:
        """Start to average if a loss more than INTERVAL validations ago was lower.

        Args:
            losses: Losses of all validations, the last one at the end.

        Returns:
            True if averaging starts now.
        """
        *before, last = losses
        if self.averages or len(before) <= INTERVAL or last <= min(before[:-INTERVAL]):
            return False
        start = max((float(state["step"]) for state in self.state.values()), default=0.0)
        for group in self.param_groups:
            group["t0"] = start
        return True


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Use, inside the block, the averaged weights of an optimizer that has them."""
    use_average(optimizer)
    try:
        yield
    finally:
        use_average(optimizer)


@torch.no_grad()
def use_average(optimizer: torch.optim.Optimizer) -> None:
    """Exchange weights and averages, if the optimizer averages."""
    if isinstance(optimizer, NTASGD) and optimizer.averages:
        for parameter, state in optimizer.state.items():
            current = parameter.clone()
            parameter.copy_(state["ax"])
            state["ax"].copy_(current)
