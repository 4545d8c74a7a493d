"""Reach every expert of a mixture, whatever the router of a model prefers."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.fold.relations import unused
from normkit.fold.trace import Trace

RANKINGS = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "max": 1}  # position of the axis among the arguments


class Routing(TorchFunctionMode):
    """Let every token choose the next experts in turn, in place of those with the highest scores.

    `experts` are the numbers of experts: scores are ranked along an axis of such a length. The tokens of another `turn`
    begin where those of the turn before stopped.

    Examples:
        >>> with Routing({3}):
        ...     torch.zeros(2, 3).topk(2)[1].tolist()
        [[0, 1], [2, 0]]
    """

    def __init__(self, experts: Collection[int], turn: int = 0):
        super().__init__()
        self.experts, self.turn = experts, turn
        self.ranked = False  # a ranking was replaced

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Replace the result of a ranking."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        place = RANKINGS.get(getattr(func, "__name__", ""))
        if place is None or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return out
        scores, dim = args[0], args[place] if len(args) > place else kwargs.get("dim", -1)
        if not isinstance(dim, int) or not scores.dim() or scores.shape[dim] not in self.experts:
            return out
        self.ranked = True
        order = func(self._scores(scores, dim, out), *args[1:], **kwargs)
        if isinstance(order, Tensor):  # indices alone
            return order
        index = order[1] if order[1].dim() == scores.dim() else order[1].unsqueeze(dim)
        return type(out)((scores.gather(dim, index).view_as(order[1]), order[1]))

    def _scores(self, like: Tensor, dim: int, out: Any) -> Tensor:
        """Scores that rank other experts highest in each row."""
        rows, experts = like.numel() // like.shape[dim], like.shape[dim]
        chosen = (out if isinstance(out, Tensor) else out[1]).numel() // max(rows, 1)
        chosen = chosen if chosen < experts else 1
        first = (torch.arange(rows, device=like.device) + self.turn * rows) * chosen
        rank = (torch.arange(experts, device=like.device) - first[:, None]) % experts
        return -rank.to(like.dtype).view(*like.movedim(dim, -1).shape).movedim(-1, dim)


def idle_experts(trace: Trace, model: nn.Module) -> tuple[set[int], int]:
    """The experts of mixtures that no call used, and how many elements of weights are idle."""
    sizes, idle, used = set[int](), 0, trace.uses()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2 and (left := unused(parameter, used.get(name, ()))) and name in used:
            sizes.add(len(parameter))
            idle += left
    for modules in (each for each in model.modules() if isinstance(each, nn.ModuleList | nn.ModuleDict)):
        names = [[trace.names.get(id(p)) for p in child.parameters()] for child in modules.children()]
        counts = [sum(name in used for name in own) for own in names]
        if any(counts) and not all(counts):
            sizes.add(len(modules))
            idle += counts.count(0)
    return sizes, idle
