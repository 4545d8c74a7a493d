"""A constant first token, and clamps, for causal models whose tokens differ much in size."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class Clamp(nn.Module):
    """Clamp each channel to a range; the range is infinite until it is set."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("low", torch.full((dim,), -torch.inf))
        self.register_buffer("high", torch.full((dim,), torch.inf))

    def forward(self, x, mask=None):
        """Return `x` within the range; a mask changes nothing."""
        return torch.clamp(x, self.low.to(x.dtype), self.high.to(x.dtype))


def begin(module, args, kwargs):
    """Put the constant keys and values before those of a text; shift masks and positions."""
    from transformers import DynamicCache

    names = list(inspect.signature(module.forward).parameters)
    given = {**kwargs, **dict(zip(names, args, strict=False))}
    caches = [given.pop(name, None) for name in ("cache", "past_key_values")]  # transformers 5.24 renamed it
    cache = next((each for each in caches if each is not None), None)
    cache, ids = DynamicCache(config=module.config) if cache is None else cache, given.get("input_ids")
    if cache.get_seq_length() == 0:
        size = (given["inputs_embeds"] if ids is None else ids).shape[0]  # len() would fix it in an export
        for layer, pair in enumerate(zip(module.first_keys, module.first_values, strict=True)):
            cache.update(*(each.expand(size, -1, -1, -1) for each in pair), layer)
    given["cache" if "cache" in names else "past_key_values"] = cache
    if (mask := given.get("attention_mask")) is not None:
        given["attention_mask"] = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    if given.get("position_ids") is not None:
        given["position_ids"] = given["position_ids"] + 1
    return (), given


def put_first_token(model: Any, keys: Tensor, values: Tensor) -> None:
    """Let every text of a causal model begin with a token of keys and values alone, in place.

    The token is before those that the model is given, and its own output is not returned.

    Args:
        model: A causal model of transformers.
        keys: Keys by layer, `[layers, 1, heads, 1, width]`.
        values: Values by layer, alike.
    """
    base = model.base_model
    base.register_buffer("first_keys", keys)
    base.register_buffer("first_values", values)
    base.register_forward_pre_hook(begin, with_kwargs=True)


@torch.no_grad()
def keep_first_token(model: Any, token: int) -> None:
    """Let every text of a causal model begin with one token, in place."""
    device = next(model.parameters()).device
    found = model(torch.tensor([[token]], device=device), use_cache=True)
    layers = (found["cache"] if "cache" in found else found["past_key_values"]).layers
    if any(getattr(layer, "keys", None) is None for layer in layers):
        raise ValueError(f"{type(model).__name__} has layers without keys; a first token can stay in attention alone")
    put_first_token(model, *(torch.stack([getattr(x, k) for x in layers]) for k in ("keys", "values")))
