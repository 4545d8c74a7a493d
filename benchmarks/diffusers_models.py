"""Tiny, random diffusion Transformers of diffusers, for the compatibility page.

`CASES` maps a name to a function that builds the case.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from third_party_models import Case, pixels, randomize

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4, "out_channels": 4}
IMAGE, VIDEO, TOKENS = (2, 4, 8, 8), (2, 4, 3, 8, 8), (2, 16, 4)
STEPS = torch.tensor([3, 500])


def _text(width: int = 24) -> Tensor:
    return torch.randn(2, 7, width, generator=torch.Generator().manual_seed(3))


def _pooled(width: int) -> Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(4))


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name: class, options, arguments of a call
    "DiT": ("DiTTransformer2DModel", {**HEADS, "sample_size": 8, "num_embeds_ada_norm": 1000},
            {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "class_labels": torch.tensor([1, 2])}),
    "PixArt": ("PixArtTransformer2DModel",
               {**HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 24,
                "use_additional_conditions": False},
               {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _text(),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    "Sana": ("SanaTransformer2DModel",
             {**HEADS, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
              "caption_channels": 24, "sample_size": 8},
             {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _text()}),
    "Stable Diffusion 3": ("SD3Transformer2DModel",
                           {**HEADS, "sample_size": 8, "joint_attention_dim": 24, "caption_projection_dim": 32,
                            "pooled_projection_dim": 20, "pos_embed_max_size": 16},
                           {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _text(),
                            "pooled_projections": _pooled(20)}),
    "AuraFlow": ("AuraFlowTransformer2DModel",
                 {**{key: value for key, value in HEADS.items() if key != "num_layers"}, "sample_size": 8,
                  "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 24,
                  "caption_projection_dim": 32, "pos_embed_max_size": 16},
                 {"hidden_states": pixels(*IMAGE), "timestep": STEPS / 1000, "encoder_hidden_states": _text()}),
    "FLUX": ("FluxTransformer2DModel",
             {**HEADS, "patch_size": 1, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 24,
              "pooled_projection_dim": 20, "axes_dims_rope": (4, 4, 8)},
             {"hidden_states": pixels(*TOKENS), "timestep": STEPS / 1000, "encoder_hidden_states": _text(),
              "pooled_projections": _pooled(20), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}),
    "Qwen-Image": ("QwenImageTransformer2DModel",
                   {**HEADS, "in_channels": 16, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6)},
                   {"hidden_states": pixels(2, 16, 16), "timestep": STEPS / 1000, "encoder_hidden_states": _text(),
                    "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.long),
                    "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]]}),
    "Lumina 2": ("Lumina2Transformer2DModel",
                 {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
                  "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 6, 6),
                  "axes_lens": (20, 20, 20), "cap_feat_dim": 24},
                 {"hidden_states": pixels(*IMAGE), "timestep": STEPS / 1000, "encoder_hidden_states": _text(),
                  "encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool)}),
    "Wan": ("WanTransformer3DModel",
            {**HEADS, "text_dim": 24, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
            {"hidden_states": pixels(*VIDEO), "timestep": STEPS, "encoder_hidden_states": _text()}),
    "LTX-Video": ("LTXVideoTransformer3DModel", {**HEADS, "cross_attention_dim": 32, "caption_channels": 24},
                  {"hidden_states": pixels(*TOKENS), "timestep": STEPS, "encoder_hidden_states": _text(),
                   "encoder_attention_mask": torch.ones(2, 7), "num_frames": 1, "height": 4, "width": 4}),
    "CogVideoX": ("CogVideoXTransformer3DModel",
                  {**HEADS, "time_embed_dim": 8, "text_embed_dim": 24, "sample_width": 8, "sample_height": 8,
                   "sample_frames": 9, "max_text_seq_length": 7},
                  {"hidden_states": pixels(2, 3, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": _text()}),
    "Stable Audio": ("StableAudioDiTModel",
                     {**HEADS, "sample_size": 8, "num_key_value_attention_heads": 2, "cross_attention_dim": 32,
                      "time_proj_dim": 16, "global_states_input_dim": 20, "cross_attention_input_dim": 24},
                     {"hidden_states": pixels(2, 4, 8), "timestep": STEPS / 1000, "encoder_hidden_states": _text(),
                      "global_hidden_states": _pooled(20)[:, None]}),
}  # fmt: skip


def _case(name: str) -> Case:
    import diffusers

    kind, options, kwargs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**options)
    for p in model.parameters():  # modulations begin at zero
        if p.dim() > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return Case(randomize(model).eval(), (), kwargs, None, lambda out: out.sample)


CASES: dict[str, Callable[[], Case]] = {f"diffusers {name}": partial(_case, name) for name in MODELS}
