"""Tiny third-party models with examples, for tests and for the table of models.

Nothing is downloaded. Norms get random gains and biases: an identity affine hides bugs.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision_stub import load_torchvision

from normkit.models import find
from normkit.norms import StatNorm


class Case(NamedTuple):
    """A model, an example of its input, and the argument that marks real tokens."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    mask_from: str | None = None
    outputs: Callable[[Any], Any] | None = None  # picks the used part of the output; None for all of it


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomize gains, biases and statistics of norms, biases of layers, zero weights."""
    generator = torch.Generator().manual_seed(seed)

    def noise(t: Tensor) -> Tensor:
        return torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)

    with torch.no_grad():
        for name in find(model):
            norm = model.get_submodule(name)
            for key, p in norm.named_parameters():
                p.copy_(p * (0.5 + noise(p)) + (0.4 * noise(p) - 0.2 if key == "bias" or not p.any() else 0))
            if isinstance(norm, StatNorm):
                norm.running.copy_(0.5 + noise(norm.running))
                if norm.center:
                    norm.running[0] -= 1.0
            elif isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.running_mean.copy_(noise(norm.running_mean) - 0.5)
                norm.running_var.copy_(0.5 + noise(norm.running_var))
        for module in model.modules():
            bias = getattr(module, "bias", None)
            if isinstance(module, nn.Linear | nn.Conv2d) and bias is not None:
                bias.copy_(0.2 * noise(bias) - 0.1)
        for name, p in model.named_parameters():
            if p.dim() > 1 and "bias" not in name and not p.any():  # a head of zeros hides everything before it
                p.copy_(0.2 * noise(p) - 0.1)
    return model


def tokens(*shape: int, high: int = 50, seed: int = 1) -> Tensor:
    """Random token ids, none of them 0 or 1 (padding)."""
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))


def pixels(*shape: int) -> Tensor:
    """A random image."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def padding(batch: int = 2, length: int = 7) -> Tensor:
    """1 where a token is real; the last sentence is two tokens shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
LLAMA = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8}


def _hf(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return randomize(getattr(transformers, name)(getattr(transformers, config)(**options))).eval()


def _text(model: nn.Module, **more: Any) -> Case:
    kwargs = {"input_ids": tokens(2, 7), "attention_mask": padding(), **more}
    return Case(model, (), kwargs, "attention_mask", lambda out: out.logits)


def bert() -> Case:
    """Post-norm encoder with a tied output."""
    return _text(_hf("BertForMaskedLM", "BertConfig", **SMALL, max_position_embeddings=32))


def roberta() -> Case:
    """BERT with positions that count from padding."""
    return _text(_hf("RobertaForMaskedLM", "RobertaConfig", **SMALL, max_position_embeddings=40))


def gpt2() -> Case:
    """Pre-norm decoder with Conv1D layers and a tied output."""
    return _text(_hf("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32,
                     bos_token_id=1, eos_token_id=1))  # fmt: skip


def _pair(model: nn.Module) -> Case:
    return _text(model, decoder_input_ids=tokens(2, 5, seed=3), decoder_attention_mask=padding(2, 5))


def t5() -> Case:
    """Encoder-decoder with RMSNorms and no biases."""
    return _pair(_hf("T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                     vocab_size=50, decoder_start_token_id=0))  # fmt: skip


PAIR = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50,
        "max_position_embeddings": 32}  # fmt: skip


def bart() -> Case:
    """Post-norm encoder-decoder with norms of the embeddings."""
    return _pair(_hf("BartForConditionalGeneration", "BartConfig", **PAIR, forced_eos_token_id=None))


def marian() -> Case:
    """Post-norm translation model."""
    return _pair(_hf("MarianMTModel", "MarianConfig", **PAIR, pad_token_id=0, decoder_start_token_id=0, eos_token_id=1,
                     forced_eos_token_id=None))  # fmt: skip


def llama() -> Case:
    """Pre-norm decoder with RMSNorms and an untied head."""
    return _text(_hf("LlamaForCausalLM", "LlamaConfig", **LLAMA))


def mistral() -> Case:
    """As Llama, with a sliding window."""
    return _text(_hf("MistralForCausalLM", "MistralConfig", **LLAMA))


def qwen() -> Case:
    """As Llama, with norms of queries and keys."""
    return _text(_hf("Qwen3ForCausalLM", "Qwen3Config", **LLAMA))


def gemma() -> Case:
    """As Llama, with gains stored less one, and a tied head."""
    return _text(_hf("GemmaForCausalLM", "GemmaConfig", **LLAMA))


def gemma2() -> Case:
    """Norms before and after each block."""
    return _text(_hf("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, attn_implementation="eager"))


def hf_vit() -> Case:
    """Vision Transformer of transformers."""
    options = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    model = _hf("ViTForImageClassification", "ViTConfig", **options, image_size=16, patch_size=8)
    return Case(model, (), {"pixel_values": pixels(2, 3, 16, 16)}, None, lambda out: out.logits)


def hf_swin() -> Case:
    """Swin of transformers, at a size that needs no padding."""
    model = _hf("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1],
                num_heads=[2, 2], window_size=4)  # fmt: skip
    return Case(model, (), {"pixel_values": pixels(2, 3, 32, 32)}, None, lambda out: out.logits)


def hf_resnet() -> Case:
    """ResNet of transformers: BatchNorm2d between convolutions."""
    model = _hf("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1],
                layer_type="basic")  # fmt: skip
    return Case(model, (), {"pixel_values": pixels(2, 3, 24, 24)}, None, lambda out: out.logits)


def timm_vit() -> Case:
    """Vision Transformer of timm."""
    timm = _timm()
    model = timm.create_model("test_vit", num_classes=7, img_size=32)
    return Case(randomize(model).eval(), (pixels(2, 3, 32, 32),), {})


def timm_deit() -> Case:
    """DeiT of timm, with its distillation token."""
    timm = _timm()
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224", img_size=32, depth=2, embed_dim=12, num_heads=3, num_classes=7
    )
    return Case(randomize(model).eval(), (pixels(2, 3, 32, 32),), {})


def timm_swin() -> Case:
    """Swin of timm."""
    timm = _timm()
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=8, depths=(2, 1), num_heads=(2, 2),
                              num_classes=7, window_size=7)  # fmt: skip
    return Case(randomize(model).eval(), (pixels(2, 3, 56, 56),), {})


def timm_convnext() -> Case:
    """ConvNeXt of timm: norms with the channels in front."""
    timm = _timm()
    model = timm.create_model("test_convnext", num_classes=7)
    return Case(randomize(model).eval(), (pixels(2, 3, 64, 64),), {})


def torchvision_vit() -> Case:
    """Vision Transformer of torchvision, on `nn.MultiheadAttention`."""
    from torchvision.models import vision_transformer

    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=7)
    nn.init.normal_(model.heads.head.weight)
    return Case(randomize(model).eval(), (pixels(2, 3, 32, 32),), {})


def torchvision_swin() -> Case:
    """Swin of torchvision: zero padding after a norm unless the window divides the size."""
    from torchvision.models import swin_transformer

    torch.manual_seed(0)
    model = swin_transformer.SwinTransformer([4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=7)
    return Case(randomize(model).eval(), (pixels(2, 3, 32, 32),), {})


def _encoder(norm_first: bool) -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
    final = nn.LayerNorm(16) if norm_first else None
    model = nn.TransformerEncoder(layer, 2, norm=final, enable_nested_tensor=False)
    mask = ~padding().bool()
    return Case(randomize(model).eval(), (pixels(2, 7, 16),), {"src_key_padding_mask": mask}, "src_key_padding_mask")


def torch_encoder_post() -> Case:
    """`nn.TransformerEncoder` as it is by default, with the fused fast path."""
    return _encoder(False)


def torch_encoder_pre() -> Case:
    """`nn.TransformerEncoder` with `norm_first=True`."""
    return _encoder(True)


def _timm() -> Any:
    import timm

    torch.manual_seed(0)
    return timm


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (bert, roberta, gpt2, t5, bart, marian, llama, mistral, qwen, gemma, gemma2, hf_vit, hf_swin, hf_resnet,
                 timm_vit, timm_deit, timm_swin, timm_convnext, torchvision_vit, torchvision_swin, torch_encoder_post,
                 torch_encoder_pre)
}  # fmt: skip


def missing(name: str) -> str | None:
    """The library that a case needs and that is not installed; None where it can be built."""
    first = name.split("_", maxsplit=1)[0]
    library = first if first in ("timm", "torchvision", "torch") else "transformers"
    needed = ("torchvision",) if library in ("timm", "torchvision") else ()
    return next((package for package in (library, *needed) if importlib.util.find_spec(package) is None), None)


def case_of(name: str) -> Case:
    """The case, or a skipped test where its library is not installed."""
    if library := missing(name):
        pytest.skip(f"{library} is not installed")
    return CASES[name]()


if importlib.util.find_spec("torchvision") is not None:
    load_torchvision()
