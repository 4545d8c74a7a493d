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

    return _ready(lambda: getattr(transformers, name)(getattr(transformers, config)(**options)))


def _ready(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomize(make()).eval()


def _text(name: str, config: str, **options: Any) -> Case:
    kwargs = {"input_ids": tokens(2, 7), "attention_mask": padding()}
    return Case(_hf(name, config, **options), (), kwargs, "attention_mask", lambda out: out.logits)


def _pair(name: str, config: str, **options: Any) -> Case:
    case = _text(name, config, **options)
    more = {"decoder_input_ids": tokens(2, 5, seed=3), "decoder_attention_mask": padding(2, 5)}
    return case._replace(kwargs=case.kwargs | more)


def _hf_image(name: str, config: str, size: int, **options: Any) -> Case:
    kwargs = {"pixel_values": pixels(2, 3, size, size)}
    return Case(_hf(name, config, **options), (), kwargs, None, lambda out: out.logits)


def timm_case(name: str, size: int, **options: Any) -> Case:
    import timm

    return Case(_ready(lambda: timm.create_model(name, num_classes=7, **options)), (pixels(2, 3, size, size),), {})


def _torchvision_vit() -> Case:
    from torchvision.models import vision_transformer

    def make() -> nn.Module:
        model = vision_transformer.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=7)
        nn.init.normal_(model.heads.head.weight)
        return model

    return Case(_ready(make), (pixels(2, 3, 32, 32),), {})


def _torchvision_swin() -> Case:
    from torchvision.models import swin_transformer

    sizes = [4, 4], 8, [2, 1], [2, 2], [4, 4]
    model = _ready(lambda: swin_transformer.SwinTransformer(*sizes, num_classes=7))
    return Case(model, (pixels(2, 3, 32, 32),), {})


def _encoder(norm_first: bool) -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
    final = nn.LayerNorm(16) if norm_first else None
    model = nn.TransformerEncoder(layer, 2, norm=final, enable_nested_tensor=False)
    mask = ~padding().bool()
    return Case(randomize(model).eval(), (pixels(2, 7, 16),), {"src_key_padding_mask": mask}, "src_key_padding_mask")


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 1}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50,
      "decoder_start_token_id": 0}  # fmt: skip
PAIR = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50,
        "max_position_embeddings": 32, "forced_eos_token_id": None}  # fmt: skip
MARIAN = {**PAIR, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
VIT = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
CASES: dict[str, Callable[[], Case]] = {
    "bert": lambda: _text("BertForMaskedLM", "BertConfig", **SMALL, max_position_embeddings=32),  # post-norm, tied
    "roberta": lambda: _text("RobertaForMaskedLM", "RobertaConfig", **SMALL, max_position_embeddings=40),
    "gpt2": lambda: _text("GPT2LMHeadModel", "GPT2Config", **GPT2),  # pre-norm with Conv1D layers, tied
    "t5": lambda: _pair("T5ForConditionalGeneration", "T5Config", **T5),  # RMSNorms, no biases
    "bart": lambda: _pair("BartForConditionalGeneration", "BartConfig", **PAIR),  # post-norm, norms of embeddings
    "marian": lambda: _pair("MarianMTModel", "MarianConfig", **MARIAN),
    "llama": lambda: _text("LlamaForCausalLM", "LlamaConfig", **LLAMA),  # pre-norm with RMSNorms, an untied head
    "mistral": lambda: _text("MistralForCausalLM", "MistralConfig", **LLAMA),
    "qwen": lambda: _text("Qwen3ForCausalLM", "Qwen3Config", **LLAMA),  # norms of queries and keys
    "gemma": lambda: _text("GemmaForCausalLM", "GemmaConfig", **LLAMA),  # gains stored less one, a tied head
    "gemma2": lambda: _text("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, attn_implementation="eager"),
    "hf_vit": lambda: _hf_image("ViTForImageClassification", "ViTConfig", 16, **VIT),
    "hf_swin": lambda: _hf_image("SwinForImageClassification", "SwinConfig", 32, **SWIN),  # a size without padding
    "hf_resnet": lambda: _hf_image("ResNetForImageClassification", "ResNetConfig", 24, **RESNET),
    "timm_vit": lambda: timm_case("test_vit", 32, img_size=32),
    "timm_deit": lambda: timm_case("deit_tiny_distilled_patch16_224", 32, img_size=32, depth=2, embed_dim=12,
                                   num_heads=3),
    "timm_swin": lambda: timm_case("swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=8, depths=(2, 1),
                                   num_heads=(2, 2), window_size=7),
    "timm_convnext": lambda: timm_case("test_convnext", 64),  # channels in front
    "torchvision_vit": _torchvision_vit,  # on `nn.MultiheadAttention`
    "torchvision_swin": _torchvision_swin,  # zero padding after a norm unless the window divides the size
    "torch_encoder_post": lambda: _encoder(False),  # by default, with the fused fast path
    "torch_encoder_pre": lambda: _encoder(True),
}  # fmt: skip
# without those that have nothing which another lacks
FAMILIES = [name for name in CASES if name not in ("roberta", "marian", "mistral", "gemma", "timm_deit", "timm_swin")]


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


def run(case: Case, model: nn.Module | None = None, **changes: Any) -> Any:
    """The used part of the output of a model, by default the case's, for the example with changes."""
    out = (case.model if model is None else model)(*case.args, **{**case.kwargs, **changes})
    return out if isinstance(out, Tensor) else case.outputs(out)


if importlib.util.find_spec("torchvision") is not None:
    load_torchvision()
