"""Rotate the residual stream of a language model after its gains are folded, as QuaRot and SpinQuant do.

An RMSNorm without gain keeps the length of a vector, so an orthogonal matrix passes it: the logits stay the same, up to
the float32 in which Llama computes its norms.
"""

import sys
import warnings

import torch

import normkit as nk

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except (ImportError, RuntimeError) as missing:
    print(f"not run: {missing}")
    sys.exit()

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    tie_word_embeddings=False,
)  # fmt: skip
model, ids = LlamaForCausalLM(config).double().eval(), torch.randint(64, (2, 12))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)  # as trained
    expected = model(ids).logits


def rotated(model, q):
    """Rotate what writes the stream, and rotate back what reads it; in place."""
    with torch.no_grad():
        readers = [model.lm_head, model.model.embed_tokens]  # an embedding stores what it writes as rows
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers += [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight.copy_(q.T @ writer.weight)
        for reader in readers:
            reader.weight.copy_(reader.weight @ q)
        return model(ids).logits


q = torch.linalg.qr(torch.randn(32, 32, dtype=torch.double)).Q
folded, report = nk.fold(model, input_ids=ids, outputs=lambda out: out.logits)
print(report.count("gain folded"), "gains folded")
print("largest difference of a logit, rotated after the fold:", float((rotated(folded, q) - expected).abs().max()))
print("rotated without it:", float((rotated(model, q) - expected).abs().max()))
