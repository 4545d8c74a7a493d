"""A counter on a device, read by the host without waiting."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class AsyncCounter:
    """The last value that the host has seen of a counter that only grows.

    On a GPU the value is copied to the host in the background and read in a later call, once it has arrived. The
    answer may be some steps late, and is never wrong. Nothing is copied while a CUDA graph is captured, nor from
    tensors without numbers (meta, fake). Another counter, as that of `functional_call`, is read from the start. Replace
    the object when the same one is set back on a GPU; on a CPU each call reads it.

    >>> seen, counter = AsyncCounter(), torch.tensor(3)
    >>> seen.at_least(4, counter), seen.at_least(3, counter)
    (False, True)
    """

    def __init__(self) -> None:
        self.seen = -1
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None
        self._counter: Tensor | None = None

    def at_least(self, least: int, counter: Tensor) -> bool:
        """Return True once the host has seen the counter reach `least`."""
        if counter is not self._counter:
            self.seen, self._copy, self._counter = -1, None, counter
        if counter.is_cpu and type(counter) is Tensor:
            self.seen = int(counter.tolist())  # type: ignore[arg-type]  # on a CPU reading takes no wait
        elif counter.is_cuda and self.seen < least and not isinstance(counter, FakeTensor):
            with torch.cuda.device(counter.device):  # an event belongs to the device that is current
                self._poll(counter)
        return self.seen >= least

    def _poll(self, counter: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if self._copy is None:
            copy = torch.empty_like(counter, device="cpu", pin_memory=True)
            copy.copy_(counter, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy = copy, event
        elif self._copy[1].query():
            self.seen, self._copy = int(self._copy[0]), None
