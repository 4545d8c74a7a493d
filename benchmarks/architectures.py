"""Tiny models of transformers, timm, torchvision and diffusers for the benchmark of compatibility.

They have random weights, gains, biases and statistics. `CASES` maps a name to a function that builds the case.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from third_party_models import Case, padding, pixels, randomize, timm_case, tokens

SIZES = {  # options of configurations in transformers, used where a configuration has them
    "vocab_size": 50, "hidden_size": 16, "d_model": 16, "n_embd": 16, "dim": 16, "embedding_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 2, "n_head": 2, "n_heads": 2,
    "num_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_ff": 32, "d_kv": 8,
    "ffn_dim": 32, "ffn_hidden_size": 32, "n_inner": 32, "hidden_dim": 32, "max_position_embeddings": 64,
    "n_positions": 64, "max_source_positions": 64, "max_target_positions": 64, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "image_size": 32, "patch_size": 8,
    "rotary_dim": 8, "type_vocab_size": 2,
}  # fmt: skip
PICTURES = {"vocab_size", "patch_size"}  # left as they are for models of images
STAGES = ("hidden_sizes", "depths", "embed_dims", "hidden_dim", "neck_hidden_sizes")  # of models with several sizes

OPTIONS: dict[str, dict[str, Any]] = {  # of single configurations
    "recurrent_gemma": {"lru_width": 16, "block_types": ["recurrent", "attention"]},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_n_groups": 2, "mamba_rms_norm": True},
    "zamba2": {"n_mamba_heads": 4, "mamba_ngroups": 2, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "nemotron_h": {"mamba_num_heads": 4, "n_groups": 2, "layers_block_type": ["linear_attention", "full_attention"]},
    "switch_transformers": {"num_sparse_encoder_layers": 1},
    "esm": {"mask_token_id": 3},
    "xlm": {"emb_dim": 16},
    "flaubert": {"emb_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "funnel": {"block_sizes": [1, 1]},
    "xmod": {"default_language": "en_XX"},
    "donut-swin": {"image_size": 56, "depths": [1, 1], "num_heads": [2, 2]},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 128, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "deepseek_v3": {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
}
REAL_EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3")  # on 8 sequences of 64 tokens
SKIP = {"funnel": {"num_hidden_layers"}, "prophetnet": {"num_hidden_layers"}, "gemma4_text": {"head_dim"}}  # fmt: skip

CAUSAL = (
    "afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid beam bert-generation biogpt bitnet blenderbot bloom "
    "cohere cohere2 cohere2_moe cpmant ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama "
    "doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma3_text "
    "gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss "
    "gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe inkling_text "
    "internlm3 jais2 jamba jetmoe lfm2 lfm2_moe llama4_text longcat_flash mamba mamba2 mellum minicpm3 minimax "
    "minimax_m2 ministral mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmoe openai-gpt "
    "opt pegasus persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss "
    "smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zamba2"
).split()
FOLDED = (  # whose gains alone are folded, too, as before rotation and quantization
    "bloom cohere deepseek_v3 falcon gemma gemma2 gemma3_text gpt2 gpt_neox gpt_oss llama mamba2 mistral mixtral "
    "nemotron olmo2 olmoe opt phi3 qwen2 qwen3 qwen3_moe starcoder2"
).split()
MASKED = (
    "albert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert "
    "flaubert fnet funnel ibert jina_embeddings_v3 layoutlm longformer megatron-bert mobilebert modernbert mpnet mra "
    "nomic_bert nystromformer rembert roberta-prelayernorm roc_bert roformer squeezebert tapas xlm xlm-roberta "
    "xlm-roberta-xl xmod yoso canine"
).split()
PAIRS = (
    "blenderbot-small fsmt led longt5 m2m_100 mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet "
    "switch_transformers umt5"
).split()
IMAGES = (
    "beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers donut-swin efficientnet "
    "focalnet hgnet_v2 hiera ijepa levit mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet "
    "segformer swiftformer swinv2 textnet vit_msn"
).split()
TIMM: dict[str, dict[str, Any]] = {  # model: options
    "test_byobnet": {}, "test_convnext2": {}, "test_convnext3": {}, "test_efficientnet": {}, "test_efficientnet_gn": {},
    "test_efficientnet_ln": {}, "test_mambaout": {}, "test_resnet": {}, "test_vit2": {},
    "test_vit3": {}, "test_vit4": {},
    "resnet18": {}, "resnext26ts": {}, "mobilenetv3_small_050": {}, "regnetx_002": {}, "ghostnet_050": {},
    "repvit_m0_9": {}, "starnet_s1": {}, "efficientvit_b0": {}, "fastvit_t8": {},
    "poolformer_s12": {}, "poolformerv2_s12": {}, "convformer_s18": {}, "edgenext_xx_small": {}, "visformer_tiny": {"img_size": 64},
    "pvt_v2_b0": {}, "levit_128s": {}, "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2}, "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2}, "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "depth": 2}, "twins_pcpvt_small": {"img_size": 64, "depths": (1, 1, 1, 1)},
    "crossvit_tiny_240": {}, "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}, "davit_tiny": {"depths": (1, 1), "embed_dims": (12, 24), "num_heads": (2, 2)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)}, "inception_next_atto": {}, "mobilevit_xxs": {}, "sequencer2d_s": {"layers": (1, 1, 1, 1)},
}  # fmt: skip
FIXED = {"crossvit_tiny_240": 240, "levit_128s": 224, "test_vit3": 160}  # sizes of images that cannot be chosen
TORCHVISION = (
    "resnet18 mobilenet_v2 mobilenet_v3_small efficientnet_b0 shufflenet_v2_x0_5 mnasnet0_5 regnet_y_400mf vgg11_bn "
    "convnext_tiny swin_v2_t"
).split()


def _configuration(kind: str, skip: set[str], more: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    optional = ("sliding_window", "q_lora_rank")
    if skip >= PICTURES and any(hasattr(default, key) for key in STAGES):
        skip = set(SIZES) - {"image_size"}
    sizes = {
        key: size
        for key, size in SIZES.items()
        if key not in skip | SKIP.get(kind, set())
        and not isinstance(getattr(type(default), key, None), property)
        and hasattr(default, key)
        and (type(getattr(default, key)) is int or (getattr(default, key) is None and key not in optional))
    }
    options = {**OPTIONS.get(kind, {}), **more}
    config = CONFIG_MAPPING[kind](**{**sizes, "attn_implementation": "eager", **options})
    for key, value in options.items():  # a size of another name may have replaced it
        if getattr(config, key) != value:
            setattr(config, key, value)
    return config


def _transformers(kind: str, mapping: str, pictures: bool = False, **more: Any) -> nn.Module:
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, mapping).get(kind)
    name = name if isinstance(name, str | None) else name[0]
    config = _configuration(kind, PICTURES if pictures else set(), more)
    torch.manual_seed(0)
    model = getattr(transformers, name or CLASSES[kind])(config)
    for place, module in model.named_modules() if kind == "nanochat" else ():
        if type(module).__name__ == "NanoChatRMSNorm":  # it has no weight, so it does not store its size
            heads = config.num_attention_heads if place.endswith(("q_norm", "k_norm")) else 1
            module.normalized_shape = (config.hidden_size // heads,)
    return randomize(model).eval()


def _given(*shape: int) -> Tensor:
    """Numbers that the caller passes: one set, the others zero."""
    return torch.eye(*shape).long()


MORE: dict[str, dict[str, Any]] = {  # arguments without which a call leaves weights unused
    "longformer": {"global_attention_mask": _given(2, 7)},
    "led": {"global_attention_mask": _given(2, 7)},
    "prophetnet": {"labels": tokens(2, 5, seed=3)},
    "canine": {"input_ids": tokens(2, 20), "attention_mask": padding(2, 20)},
    "deepseek_v4": {"input_ids": tokens(8, 160), "attention_mask": padding(8, 160)},
    "blenderbot": {"encoder_hidden_states": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))},
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configurations of models with experts
CLASSES = {"canine": "CanineForTokenClassification"}


def _reach_all_experts(model: nn.Module) -> None:
    """Draw embeddings and routers, and zero the biases of experts: a few rows reach all."""
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(model.get_input_embeddings().weight, generator=generator)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("expert_bias", "correction_bias")):
            nn.init.zeros_(tensor)
        elif name.endswith("router.gate.weight"):
            nn.init.normal_(tensor, generator=generator)


def _text(kind: str, mapping: str, **more: Any) -> Case:
    model = _transformers(kind, mapping, **more)
    takes = inspect.signature(model.forward).parameters
    rows = 2
    if any(getattr(model.config, name, None) for name in EXPERTS):
        rows = 16
        _reach_all_experts(model)
    rows, length = (8, 64) if kind in REAL_EXPERTS else (rows, 7)
    kwargs: dict[str, Any] = {"input_ids": tokens(rows, length), "attention_mask": padding(rows, length)}
    if mapping == "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES":
        kwargs |= {"decoder_input_ids": tokens(rows, 5, seed=3), "decoder_attention_mask": padding(rows, 5)}
    if "attention_mask" not in takes:
        del kwargs["attention_mask"]
    if "use_cache" in takes:
        kwargs["use_cache"] = False
    kwargs |= MORE.get(kind, {})
    if kind == "tapas":
        kwargs["token_type_ids"] = torch.zeros(2, 7, 7, dtype=torch.long)
    return Case(model, (), kwargs, None, lambda out: out.logits)


def _image(kind: str) -> Case:
    model = _transformers(kind, "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", pictures=True)
    size = getattr(model.config, "image_size", 64)
    size = size if isinstance(size, int) else size[0]
    return Case(model, (), {"pixel_values": pixels(2, 3, size, size)}, None, lambda out: out.logits)


def _timm(name: str) -> Case:
    return timm_case(name, TIMM[name].get("img_size", FIXED.get(name, 64)), **TIMM[name])


def _torchvision(name: str) -> Case:
    import torchvision

    torch.manual_seed(0)
    return Case(randomize(torchvision.models.get_model(name, num_classes=7)).eval(), (pixels(2, 3, 64, 64),), {})


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4, "out_channels": 4}
IMAGE, VIDEO, TOKENS = (2, 4, 8, 8), (2, 4, 3, 8, 8), (2, 16, 4)
STEPS = torch.tensor([3, 500])


def _prompt(width: int = 24) -> Tensor:
    return torch.randn(2, 7, width, generator=torch.Generator().manual_seed(3))


def _pooled(width: int) -> Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(4))


DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name: class, options, arguments of a call
    "DiT": ("DiTTransformer2DModel", {**HEADS, "sample_size": 8, "num_embeds_ada_norm": 1000},
            {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "class_labels": torch.tensor([1, 2])}),
    "PixArt": ("PixArtTransformer2DModel",
               {**HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 24,
                "use_additional_conditions": False},
               {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _prompt(),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    "Sana": ("SanaTransformer2DModel",
             {**HEADS, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
              "caption_channels": 24, "sample_size": 8},
             {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _prompt()}),
    "Stable Diffusion 3": ("SD3Transformer2DModel",
                           {**HEADS, "sample_size": 8, "joint_attention_dim": 24, "caption_projection_dim": 32,
                            "pooled_projection_dim": 20, "pos_embed_max_size": 16},
                           {"hidden_states": pixels(*IMAGE), "timestep": STEPS, "encoder_hidden_states": _prompt(),
                            "pooled_projections": _pooled(20)}),
    "AuraFlow": ("AuraFlowTransformer2DModel",
                 {**{key: value for key, value in HEADS.items() if key != "num_layers"}, "sample_size": 8,
                  "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 24,
                  "caption_projection_dim": 32, "pos_embed_max_size": 16},
                 {"hidden_states": pixels(*IMAGE), "timestep": STEPS / 1000, "encoder_hidden_states": _prompt()}),
    "FLUX": ("FluxTransformer2DModel",
             {**HEADS, "patch_size": 1, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 24,
              "pooled_projection_dim": 20, "axes_dims_rope": (4, 4, 8)},
             {"hidden_states": pixels(*TOKENS), "timestep": STEPS / 1000, "encoder_hidden_states": _prompt(),
              "pooled_projections": _pooled(20), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}),
    "Qwen-Image": ("QwenImageTransformer2DModel",
                   {**HEADS, "in_channels": 16, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6)},
                   {"hidden_states": pixels(2, 16, 16), "timestep": STEPS / 1000, "encoder_hidden_states": _prompt(),
                    "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.long),
                    "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]]}),
    "Lumina 2": ("Lumina2Transformer2DModel",
                 {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
                  "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 6, 6),
                  "axes_lens": (20, 20, 20), "cap_feat_dim": 24},
                 {"hidden_states": pixels(*IMAGE), "timestep": STEPS / 1000, "encoder_hidden_states": _prompt(),
                  "encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool)}),
    "Wan": ("WanTransformer3DModel",
            {**HEADS, "text_dim": 24, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
            {"hidden_states": pixels(*VIDEO), "timestep": STEPS, "encoder_hidden_states": _prompt()}),
    "LTX-Video": ("LTXVideoTransformer3DModel", {**HEADS, "cross_attention_dim": 32, "caption_channels": 24},
                  {"hidden_states": pixels(*TOKENS), "timestep": STEPS, "encoder_hidden_states": _prompt(),
                   "encoder_attention_mask": torch.ones(2, 7), "num_frames": 1, "height": 4, "width": 4}),
    "CogVideoX": ("CogVideoXTransformer3DModel",
                  {**HEADS, "time_embed_dim": 8, "text_embed_dim": 24, "sample_width": 8, "sample_height": 8,
                   "sample_frames": 9, "max_text_seq_length": 7},
                  {"hidden_states": pixels(2, 3, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": _prompt()}),
    "Stable Audio": ("StableAudioDiTModel",
                     {**HEADS, "sample_size": 8, "num_key_value_attention_heads": 2, "cross_attention_dim": 32,
                      "time_proj_dim": 16, "global_states_input_dim": 20, "cross_attention_input_dim": 24},
                     {"hidden_states": pixels(2, 4, 8), "timestep": STEPS / 1000, "encoder_hidden_states": _prompt(),
                      "global_hidden_states": _pooled(20)[:, None]}),
}  # fmt: skip


def _diffusers(name: str) -> Case:
    import diffusers

    kind, options, kwargs = DIFFUSERS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**options)
    for p in model.parameters():  # modulations begin at zero
        if p.dim() > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return Case(randomize(model).eval(), (), kwargs, None, lambda out: out.sample)


MANY = "transformers mixtral, 128 experts"
GAINS = (*(f"transformers {kind}" for kind in FOLDED), MANY)
CASES: dict[str, Callable[[], Case]] = {
    **{
        f"transformers {kind}": partial(_text, kind, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
        for kind in dict.fromkeys([*CAUSAL, *FOLDED])
    },
    MANY: partial(_text, "mixtral", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", num_local_experts=128),
    **{f"transformers {kind}": partial(_text, kind, "MODEL_FOR_MASKED_LM_MAPPING_NAMES") for kind in MASKED},
    **{f"transformers {kind}": partial(_text, kind, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES") for kind in PAIRS},
    **{f"transformers {kind}": partial(_image, kind) for kind in IMAGES},
    **{f"timm {name}": partial(_timm, name) for name in TIMM},
    **{f"torchvision {name}": partial(_torchvision, name) for name in TORCHVISION},
    **{f"diffusers {name}": partial(_diffusers, name) for name in DIFFUSERS},
}
