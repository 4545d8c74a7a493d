"""What the host knows of a counter on a device, without ever waiting for it."""

import torch
from torch import Tensor


class AsyncCounter:
    """A counter that only grows, as the host saw it last.

    On a GPU its value is copied to the host in the background, and looked at in a later call, when it has arrived:
    the answer may come a step or two late, and is never wrong. While a CUDA graph is captured nothing is copied.
    Whoever sets the counter back makes a new one of these.

    >>> seen, counter = AsyncCounter(), torch.tensor(3)
    >>> seen.at_least(4, counter), seen.at_least(3, counter)
    (False, True)
    """

    def __init__(self) -> None:
        self._seen = -1
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None

    def at_least(self, least: int, counter: Tensor) -> bool:
        """Whether the counter is known to have reached `least`."""
        if self._seen >= least:
            return True
        if not counter.is_cuda:
            self._seen = int(counter.tolist())  # type: ignore[arg-type]  # where the host is the device there is nothing to wait for
        elif not torch.cuda.is_current_stream_capturing():
            self._look(counter)
        return self._seen >= least

    def _look(self, counter: Tensor) -> None:
        if self._coming is None:
            there = torch.empty_like(counter, device="cpu", pin_memory=True)
            there.copy_(counter, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = there, event
        elif self._coming[1].query():
            self._seen, self._coming = int(self._coming[0]), None
