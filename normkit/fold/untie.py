"""Give output layers that are tied to an embedding weights of their own."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn


def untie_embeddings(model: nn.Module) -> int:
    """Give layers tied to an embedding their own weight and bias; return the numbers added."""
    before = sum(p.numel() for p in model.parameters())
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    copies: dict[int, nn.Parameter] = {}
    untied = set()
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or id(weight) not in tables or isinstance(module, nn.Embedding):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None:
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, key, copies.setdefault(id(parameter), own))
                untied.add(f"{name}.{key}")
    _forget_ties(model, untied)
    return sum(p.numel() for p in model.parameters()) - before


def _forget_ties(model: nn.Module, untied: set[str]) -> None:
    """Let a model of Hugging Face tie these parameters no more, as when it is resized, saved or loaded.

    `tie_word_embeddings` stays where the model still ties others, such as the embeddings of an encoder and a decoder,
    and where its forward reads that option.
    """
    forwards = (inspect.unwrap(type(module).forward) for module in model.modules())
    is_read = any("tie_word_embeddings" in getattr(each, "__code__", each).co_names for each in forwards)
    modules: list[tuple[str, Any]] = [
        each for each in model.named_modules() if hasattr(each[1], "all_tied_weights_keys")
    ]
    changed, ties = [], False
    for prefix, module in modules:
        own = {name.removeprefix(f"{prefix}." if prefix else "") for name in untied if name.startswith(prefix)}
        before = module.get_expanded_tied_weights_keys() if module._tied_weights_keys else {}
        left = {key: source for key, source in before.items() if key not in own}
        module.all_tied_weights_keys = {k: source for k, source in module.all_tied_weights_keys.items() if k not in own}
        ties |= bool(left)  # of an encoder and a decoder, perhaps in a module inside
        if len(left) < len(before):
            module._tied_weights_keys = left  # of this model alone, not of its class
            changed.append(module.config)
    for config in (each for whole in changed for each in _configs(whole)) if not ties and not is_read else ():
        config.tie_word_embeddings = False


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it that tie word embeddings, as that of the text."""
    if getattr(config, "tie_word_embeddings", False):
        yield config
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            yield from _configs(part)
