"""Rotate the residual stream of a Llama after its gains are folded, as QuaRot and SpinQuant do.

    python examples/rotate_a_language_model.py [FOLDER]

FOLDER holds a Llama, such as SmolLM2; without it, a tiny one is made. An RMSNorm without a gain keeps the length of a
vector, so an orthogonal matrix passes it. The logits stay the same, up to the float32 in which Llama computes norms.
"""

import copy
import math
import sys
import warnings

import torch

import normkit as nk

sys.modules.setdefault("torchvision", None)  # not needed, and its build may not fit this PyTorch
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


def rotation(size):
    """Draw an orthogonal matrix: a Hadamard matrix times a random one, with random signs."""
    power = size & -size  # the largest power of two in the size
    q = torch.linalg.qr(torch.randn(size // power, size // power, dtype=torch.double)).Q.contiguous()
    while len(q) < size:
        q = torch.kron(q, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double) / math.sqrt(2))
    return torch.randint(2, (size, 1)).mul(2).sub(1) * q


@torch.no_grad()
def rotated(model, q):
    """A copy whose layers write the stream times `q`, and read it times the inverse of `q`."""
    model = copy.deepcopy(model)
    readers = {model.lm_head.weight, model.model.embed_tokens.weight}  # one, if tied; embeddings write rows
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
        readers.update(each.weight for each in projections)
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight.copy_(q.T @ writer.weight.double())
    for weight in readers:
        weight.copy_(weight.double() @ q)
    return model


def tiny():
    """Make a small Llama with random gains, as training would leave them."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
def main():
    """Compare the logits of a model rotated after the fold, and without it."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else tiny()
    model.double().eval()
    ids, q = torch.randint(3, model.config.vocab_size, (2, 12)), rotation(model.config.hidden_size)
    expected = model(ids).logits
    folded, report = nk.fold(model, input_ids=ids, outputs=lambda out: out.logits, untie=True)
    gains = report.count("gain folded")
    print(gains, "gains folded" if gains else "gains folded, as all were 1: FOLDER was folded before")
    for name, each in (("after the fold", folded), ("without it", model)):
        difference = (rotated(each, q)(ids).logits - expected).abs().max() / expected.abs().max()
        print(f"rotated {name}, logits differ by {float(difference):.1e} of the largest")


if __name__ == "__main__":
    main()
