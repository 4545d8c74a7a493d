"""Attribute the logits of a language model to its parts, without an approximation.

    pip install -e ".[demo]" && python examples/attribute_logits.py

LayerNorm divides the residual stream by a number that depends on all of it. Attribution to parts of the model then
freezes that number, and errs when a part is removed. A model without norms adds its parts up: each has its own logits,
and removing one changes the logits by exactly these. Some seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from normkit_papers.data.embedded import SOURCES
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM

import normkit as nk

torch.manual_seed(0)
torch.set_num_threads(1)
words = SOURCES["pydoc"]().train.long()
config = Model(width=48, hidden=96, depth=2, heads=4, tie=False, max_length=32)
model = DecoderLM(config, int(words.max()) + 1)


def pieces(count):
    return words[torch.randint(len(words) - 33, (count, 1)) + torch.arange(33)]


optimizer = torch.optim.AdamW(model.train().parameters(), 3e-3)
for _ in range(60):
    text = pieces(32)
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad(), loss.backward(), optimizer.step()


def parts(model, tokens):
    """Return what each part adds to the residual stream, by name."""
    found = {}
    handles = [model.embedding.register_forward_hook(lambda *call: found.update(embedding=call[2]))]

    def heads(out, args, name):
        width = out.in_features // config.heads
        for head in range(config.heads):
            at = slice(head * width, head * width + width)
            found[f"{name} head {head}"] = args[0][..., at] @ out.weight[:, at].T
        found[f"{name} bias"] = out.bias.expand_as(args[0])

    for index, layer in enumerate(model.decoder.layers):
        handles.append(layer.attention.out.register_forward_hook(
            lambda out, args, y, name=f"layer {index}": heads(out, args, name)))  # fmt: skip
        handles.append(layer.feedforward.register_forward_hook(
            lambda block, args, y, name=f"layer {index} feed-forward": found.update({name: y})))  # fmt: skip
    logits = model(tokens)
    [handle.remove() for handle in handles]
    return logits, found


def worst(difference, logits):
    return float(difference.abs().max() / logits.abs().max())


with torch.no_grad():
    model, tokens = model.eval(), pieces(8)[:, :-1]
    fitted = nk.calibrate(nk.convert(model, "un"), [pieces(32)[:, :-1] for _ in range(8)], like=model)
    folded = nk.fold(fitted, tokens)[0].double()

    logits, added = parts(folded, tokens)
    own = {name: F.linear(part, folded.output.linear.weight) for name, part in added.items()}  # its logits
    print(f"without norms: sum of {len(own)} parts and the bias against the logits, largest relative error "
          f"{worst(sum(own.values()) + folded.output.linear.bias - logits, logits):.0e}")  # fmt: skip
    for name, part in sorted(own.items(), key=lambda item: -item[1].std())[:4]:
        print(f"    {name:24} standard deviation of its logits {part.std():.2f}")

    errors = {}
    for kind, each in (("LayerNorm, scale frozen", model.double()), ("without norms", folded)):
        logits, added = parts(each, tokens)
        stream, out = sum(added.values()), each.output.linear
        norm = each.decoder.final_norm
        worsts = []
        for part in added.values():
            without = out(norm(stream - part))
            if isinstance(norm, torch.nn.Identity):
                predicted = logits - F.linear(part, out.weight)
            else:  # the norm of the whole stream, taken as a linear map
                scale = (stream.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt()
                predicted = logits - F.linear((part - part.mean(-1, keepdim=True)) * scale * norm.weight, out.weight)
            worsts.append(worst(predicted - without, logits))
        errors[kind] = max(worsts)
        print(f"{kind}: predicted against true logits after one part is removed, largest relative error "
              f"{errors[kind]:.0e}")  # fmt: skip
assert errors["without norms"] < 1e-12 < errors["LayerNorm, scale frozen"]
