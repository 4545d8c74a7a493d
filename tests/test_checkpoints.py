"""Checkpoints that fold from folder to folder, for the same loader."""

import gc
import json
import shutil
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision_stub import load_torchvision

from normkit.cli import main
from normkit.fold import fold
from normkit.fold.checkpoints import Checkpoint, Stored, doubtful_gains
from normkit.fold.folders import audit_dir, fold_dir
from normkit.models import lazy

load_torchvision()  # before transformers looks for it
T = pytest.importorskip("transformers")
IDS = torch.randint(3, 48, (4, 12), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0, "intermediate_size": 24}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {key: SMALL[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
# class: its configuration, gains that fold, biases that stay in their norms; the last gain of a tied model stays
CASES = {
    "Llama": (GROUPED, 5, 0), "Mistral": (GROUPED, 5, 0), "Qwen2": (GROUPED, 5, 0), "Phi3": (GROUPED, 5, 0),
    "Qwen3": (HEADS, 5, 0), "Olmo2": (GROUPED, 1, 0), "Starcoder2": (GROUPED, 5, 1), "Nemotron": (GROUPED, 5, 5),
    "Gemma": (HEADS, 5, 0), "Gemma2": (HEADS, 5, 0), "Cohere": (GROUPED, 3, 0), "GPTNeoX": (SMALL, 5, 1),
    "GPT2": ({**GPT, "n_embd": 16, "n_layer": 2, "n_head": 2}, 5, 1),
    "OPT": ({**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}, 5, 1),
    "Bloom": ({**GPT, "hidden_size": 16, "n_layer": 2, "n_head": 2}, 5, 1),
    "Falcon": (SMALL, 3, 3), "Mamba2": ({**SMALL, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1,
                                         "chunk_size": 4}, 5, 0),
    "Mixtral": ({**GROUPED, "num_local_experts": 4}, 5, 0), "GptOss": ({**HEADS, "num_local_experts": 4}, 5, 0),
    "Qwen3Moe": ({**HEADS, **EXPERTS, "num_experts": 12}, 5, 0),
    "DeepseekV3": ({**GROUPED, **MLA, **EXPERTS, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
                    "topk_group": 1}, 9, 0),
}  # fmt: skip
EXPERT_KERNELS = ("Mixtral", "GptOss", "Qwen3Moe", "DeepseekV3")  # which have no float64


def model_of(name, **options):
    """A tiny model whose norms have gains and biases; in float64 where its class computes in it."""
    ending = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(T, name + ending)(getattr(T, name + "Config")(**CASES[name][0], **options)).eval()
    for module in model.modules():
        for key, parameter in module._parameters.items() if "Norm" in type(module).__name__ else ():
            if parameter is not None:
                stored_less = key == "weight" and ("Gemma" in type(module).__name__ or "1P" in type(module).__name__)
                nn.init.uniform_(parameter, 0.5 - stored_less, 1.5 - stored_less)
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(bias, std=0.3)
    return model if name in EXPERT_KERNELS else model.double()


def tensors_of(folder):
    """The name, shape and type of every tensor, by file."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found[file.name] = {key: (opened.get_slice(key).get_shape(), opened.get_slice(key).get_dtype())
                                for key in opened.keys()}  # fmt: skip  # noqa: SIM118
    return found


def error(model, other):
    with torch.no_grad():
        a, b = model(input_ids=IDS, use_cache=False).logits, other(input_ids=IDS, use_cache=False).logits
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("untie", [False, True])
def test_the_same_architecture_comes_out(name, untie, tmp_path, monkeypatch):
    _, gains, biases = CASES[name]
    if not untie:  # weights are read where they are used, in parts
        monkeypatch.setattr(lazy, "SMALL", 48)
        monkeypatch.setattr(lazy, "BLOCK", 64)
    model = model_of(name)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if untie and not tied:
        return
    model.save_pretrained(tmp_path / "model", max_shard_size="1GB" if untie else "8KB")
    (tmp_path / "model" / "tokenizer.json").write_bytes(b'{"a": 1}\r\n')
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n" if untie else "# A model\n")
    report = fold_dir(tmp_path / "model", tmp_path / "folded", untie)
    assert report.count("gain folded") == gains - (tied and not untie), str(report)
    stays = [row for row in report if "its bias stays" in row.why]
    assert len(stays) == biases - (tied and not untie and biases > 0)
    assert report.max_error < 1e-14
    again, found = type(model).from_pretrained(tmp_path / "folded", output_loading_info=True, dtype="auto")
    assert not any(found.values()), found
    classes_in_float32 = name in (*EXPERT_KERNELS, "Gemma", "Gemma2", "Cohere")
    assert error(model, again.eval()) < (1e-6 if classes_in_float32 else 1e-12)

    before, after = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "folded")
    added = {key for file in after for key in after[file].keys() - before[file].keys()}
    assert added == ({"lm_head.weight"} if untie else set())
    assert {file: {k: v for k, v in own.items() if k not in added} for file, own in after.items()} == before
    if not untie:
        assert len(after) > 1
        index = json.loads((tmp_path / "folded" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {key: file for file, own in after.items() for key in own}
    config = (tmp_path / "folded" / "config.json").read_text()
    assert json.loads(config)["tie_word_embeddings"] is (tied and not untie)
    assert untie or config == (tmp_path / "model" / "config.json").read_text()
    assert {file.name for file in (tmp_path / "folded").iterdir()} == {
        file.name for file in (tmp_path / "model").iterdir()
    }
    assert (tmp_path / "folded" / "tokenizer.json").read_bytes() == b'{"a": 1}\r\n'
    *metadata, told, card = (tmp_path / "folded" / "README.md").read_text().split("\n\n")
    assert (metadata, card) == (["---\nlicense: mit\n---"] if untie else [], "# A model\n")
    assert "normkit" in told
    assert "`model`" in told
    for row in report:
        if row.action == "gain folded":
            gated = "Gated" in type(again.get_submodule(row.name.rpartition(".")[0])).__name__
            norm = again.get_submodule(row.name.rpartition(".")[0] if gated else row.name)
            one = 0.0 if "Gemma" in name or "1P" in type(norm).__name__ else 1.0
            assert bool((norm.weight == one).all()), row


def test_python_folds_in_memory_to_the_same_numbers(tmp_path):
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "model")
    fold_dir(tmp_path / "model", tmp_path / "folded")
    folded, report = fold(model, input_ids=IDS, outputs=lambda out: out.logits)
    assert report.saved == 0
    files = load_file(tmp_path / "folded" / "model.safetensors")
    assert files.keys() == folded.state_dict().keys()
    for name, value in folded.state_dict().items():
        assert torch.equal(value, files[name]), name
    folded.save_pretrained(tmp_path / "saved")
    assert tensors_of(tmp_path / "saved") == tensors_of(tmp_path / "model")


@pytest.mark.parametrize("name", ["OPT", "GptOss"])
def test_what_python_folds_opens_by_its_own_class_unless_told_otherwise(name, tmp_path):
    model = model_of(name)
    folded, report = fold(model, input_ids=IDS, outputs=lambda out: out.logits)
    assert report.count("gain folded") > 0
    folded.save_pretrained(tmp_path)
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True, dtype="auto")
    assert not any(found.values()), found
    assert error(model, again.eval()) < (1e-6 if name in EXPERT_KERNELS else 1e-12)
    free, _ = fold(model, input_ids=IDS, outputs=lambda out: out.logits, keep_architecture=False)
    assert free.state_dict().keys() != model.state_dict().keys()


def test_norms_with_frozen_statistics_stay_where_the_architecture_does():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 2))
    for module in (model[1], model[3]):
        nn.init.uniform_(module.weight, 0.5, 1.5)
    folded, report = fold(model.eval(), torch.randn(3, 4, 3), keep_architecture=True, other_shapes=False)
    assert [row.action for row in report] == ["kept", "gain folded"]
    assert folded.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(folded(x := torch.randn(3, 4, 3)), model(x))


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL"])
def test_the_language_model_of_a_model_for_images_folds_with_a_text_prompt(name, tmp_path):
    seen = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4}  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    config = {
        "Llava": lambda: T.LlavaConfig(
            text_config=T.LlamaConfig(**GROUPED), vision_config=T.CLIPVisionConfig(**seen), image_token_index=5
        ),
        "Qwen2VL": lambda: T.Qwen2VLConfig(
            text_config=GROUPED | rope, image_token_id=5, video_token_id=6, vision_start_token_id=7,
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        ),
    }[name]()  # fmt: skip
    torch.manual_seed(0)
    model = getattr(T, name + "ForConditionalGeneration")(config).eval()
    for each in model.modules():
        if "RMSNorm" in type(each).__name__:
            nn.init.uniform_(each.weight, 0.5, 1.5)
    model.save_pretrained(tmp_path / "model")
    report = fold_dir(tmp_path / "model", tmp_path / "folded", untie=True)
    assert report.count("gain folded") == 5, str(report)
    assert any("vis" in module for module in report.other_inputs)
    again, found = type(model).from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not any(found.values()), found
    assert error(model, again.eval()) < 1e-5


# -- memory ----------------------------------------------------------------------------------------------------------


def test_large_weights_are_read_in_parts_three_times_and_never_held(tmp_path, monkeypatch):
    size = {**GROUPED, "vocab_size": 70_000, "hidden_size": 64}
    model = T.LlamaForCausalLM(T.LlamaConfig(**size)).eval()
    nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(tmp_path / "model")
    sizes, read = [], Stored.read
    monkeypatch.setattr(Stored, "read", lambda self, rows: (sizes.append((t := read(self, rows)).numel()), t)[1])
    report = fold_dir(tmp_path / "model", tmp_path / "folded")
    assert report.count("gain folded") == 1
    assert max(sizes) <= 1 << 20 < 70_000 * 64
    assert sum(sizes) < 3.1 * sum(p.numel() for p in model.parameters())  # for the comparison, to write, and back
    sizes.clear()
    assert audit_dir(tmp_path / "model")[0].count("gain folded") == 1
    assert sum(sizes) < 0.1 * sum(p.numel() for p in model.parameters())


def test_what_was_written_is_compared_too(sharded, tmp_path, monkeypatch):
    rounded = sys.modules["normkit.fold.checkpoints"]._rounded
    monkeypatch.setattr(sys.modules["normkit.fold.checkpoints"], "_rounded", lambda new, *of: rounded(1.01 * new, *of))
    with pytest.raises(RuntimeError, match="was not written"):
        fold_dir(sharded, tmp_path / "folded")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_left_after_folding():
    from normkit.fold.fold import Survey

    seen, double = [], Survey.double
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Survey, "double", lambda self: (seen.append(weakref.ref(m := double(self))), m)[1])
        gc.disable()
        try:
            for model in (model_of("Llama"), model_of("GPT2"), model_of("Mixtral")):
                fold(model, input_ids=IDS, outputs=lambda out: out.logits)
            assert len(seen) == 3
            assert not [ref for ref in seen if ref() is not None]
        finally:
            gc.enable()


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "model"
    model_of("Llama").save_pretrained(folder, max_shard_size="8KB")
    return folder


def cut(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-9])


FAULTS = {
    "shard missing": lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
    "shard cut short": cut,
    "header damaged": lambda folder: sorted(folder.glob("*.safetensors"))[1].write_bytes(b"\xff" * 50),
    "index damaged": lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_folded_is_an_error_in_one_line(fault, sharded, tmp_path, capsys):
    shutil.copytree(sharded, tmp_path / "model")
    FAULTS[fault](tmp_path / "model")
    assert main(["fold", str(tmp_path / "model"), "--out", str(tmp_path / "folded")]) == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()][1:] == ["normkit"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ValueError, match="GB free"):
        fold_dir(sharded, tmp_path / "folded")
    assert not [*tmp_path.iterdir()]


def test_an_interrupted_fold_leaves_nothing_and_can_be_repeated(sharded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            sys.modules["normkit.fold.checkpoints"], "_rounded", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            fold_dir(sharded, tmp_path / "folded")
    assert not [*tmp_path.iterdir()]
    (tmp_path / ".folded.partial").mkdir()  # of a process that was killed
    (tmp_path / ".folded.partial" / "model.safetensors").touch()
    assert fold_dir(sharded, tmp_path / "folded").count("gain folded") == 5
    assert [file.name for file in tmp_path.iterdir()] == ["folded"]


def test_a_folded_weight_that_overflows_is_not_written(tmp_path):
    model = model_of("Llama").half()
    with torch.no_grad():
        model.model.norm.weight.fill_(6e4)
        model.lm_head.weight.fill_(5.0)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(RuntimeError, match="float16"):
        fold_dir(tmp_path / "model", tmp_path / "folded")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


# -- gains of another class ------------------------------------------------------------------------------------------


def test_audit_warns_where_stored_gains_do_not_fit_the_class(tmp_path, capsys):
    for name, number in (("Llama", 0.0), ("Gemma", 1.0)):
        model = model_of(name)
        assert not doubtful_gains(model)
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        for module in norms[1:]:
            nn.init.constant_(module.weight, number)
        (warning,) = doubtful_gains(model)
        assert "4 of 5" in warning
        assert "model.norm.weight" in warning
        model.save_pretrained(tmp_path / name)
        assert audit_dir(tmp_path / name)[1] == [warning]
        assert main(["audit", str(tmp_path / name)]) == 0
        assert warning in capsys.readouterr().out


def test_a_checkpoint_keeps_a_tied_weight_that_its_file_has_twice(tmp_path):
    model = model_of("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    fold_dir(tmp_path / "model", tmp_path / "folded")
    again = type(model).from_pretrained(tmp_path / "folded", dtype="auto")
    assert error(model, again.eval()) < 1e-12
    assert Checkpoint(tmp_path / "folded").config["tie_word_embeddings"] is True
