"""Model folders of Hugging Face: saved, loaded, folded.

Unsafe or damaged ones are refused.
"""

import importlib
import json
import sys

import pytest
import torch
from norm_cases import full_disk
from safetensors.torch import load_file, save_file
from third_party_models import case_of, randomize

from normkit.cli import main
from normkit.fold import fold, to_rms
from normkit.fold.folders import audit_dir, fold_dir
from normkit.models import calibrate, convert, find, load_pretrained, save_pretrained
from normkit.norms import LayerNorm, Norm

pytest.importorskip("transformers")
FOLDED = {"llama": "5 of 5", "gpt2": "5 of 5", "hf_vit": "5 of 5", "t5": "12 of 12"}


def call(case, model):
    with torch.no_grad():
        return case.outputs(model(*case.args, **case.kwargs))


def ties(model):
    return len([*model.named_parameters(remove_duplicate=False)]) - len([*model.parameters()])


@pytest.mark.parametrize("name", FOLDED)
def test_saved_converted_model_folds_and_computes_the_same(name, tmp_path):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    save_pretrained(model, tmp_path / "model")
    again = load_pretrained(tmp_path / "model")
    torch.testing.assert_close(call(case, again), call(case, model), rtol=0, atol=0)
    for file in (files := ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json")):
        (tmp_path / "model" / file).write_text("{}")
    report = fold_dir(tmp_path / "model", tmp_path / "folded")
    assert report.foldable == FOLDED[name]
    assert report.max_error < 1e-12
    assert audit_dir(tmp_path / "model")[0].rows == report.rows
    assert [(tmp_path / "folded" / file).read_text() for file in files] == ["{}"] * 3
    folded = load_pretrained(tmp_path / "folded")
    assert not any(isinstance(module, Norm) for module in folded.modules())
    assert ties(folded) == ties(model)
    torch.testing.assert_close(call(case, folded), call(case, model), rtol=1e-4, atol=1e-5)


def test_layer_norms_that_lost_only_their_gains_load(tmp_path):
    case = case_of("gpt2")
    save_pretrained(randomize(convert(case.model, "un")).eval(), tmp_path / "un")
    fold_dir(tmp_path / "un", tmp_path / "folded")
    assert (tmp_path / "folded" / "load.py").exists()
    folded, _ = fold(
        randomize(case.model).eval(), *case.args, **case.kwargs, outputs=case.outputs, keep_architecture=False
    )
    save_pretrained(folded, tmp_path / "folded")
    again = load_pretrained(tmp_path / "folded")
    torch.testing.assert_close(call(case, again), call(case, case.model), rtol=1e-4, atol=1e-5)
    assert again.transformer.h[0].ln_1.weight is None
    spec = importlib.util.spec_from_file_location("load_again", tmp_path / "folded" / "load.py")
    load = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)  # not that of the model before, which drops all norms
    torch.testing.assert_close(call(case, load.model()), call(case, again), rtol=0, atol=0)


def test_half_precision_comes_back_as_it_was(tmp_path):
    model = randomize(convert(case_of("llama").model, "un")).eval().bfloat16()
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert again.model.norm.running.dtype == torch.float32


def test_bad_folders_are_refused_with_the_reason(tmp_path):
    config = tmp_path / "config.json"
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for name in ("nowhere", "."):
        with pytest.raises(ValueError, match=r"config\.json|no folder"):
            load_pretrained(tmp_path / name)
    files = {"pytorch_model.bin": b"", "model.safetensors": b""}
    for made, text, named in (
        ("", "{}", "architecture"),
        ("", "[]", "architecture"),
        ("", '{"architectures": ["Bert', r"config\.json"),
        ("", "[" * 100_000, r"config\.json"),
        ("", json.dumps(llama), "weights"),
        ("pytorch_model.bin", json.dumps(llama), r"pytorch_model\.bin"),
        ("", json.dumps({**llama, "auto_map": {"AutoModel": "evil.Model"}}), r"evil\.Model"),
        ("", json.dumps({**llama, "quantization_config": {"bits": 4}}), "quantized"),
        ("model.safetensors", json.dumps({**llama, "architectures": ["NoSuchModel"]}), "NoSuchModel"),
        ("", json.dumps({**llama, "architectures": ["LlamaModel"]}), r"model\.safetensors"),
    ):
        if made:
            (tmp_path / made).write_bytes(files[made])
        config.write_text(text)
        with pytest.raises(ValueError, match=named):
            load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another folder"):
        fold_dir(tmp_path, tmp_path)


# -- folders whose parts do not fit ----------------------------------------------------------------------------------


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def saved_un(folder, name="llama"):
    """A converted model, saved by transformers itself as `Trainer` does."""
    case = case_of(name)
    model = randomize(convert(case.model, "un", mask_from=case.mask_from)).eval()
    model.save_pretrained(folder)
    return case, model


def test_wrong_tensors_in_a_checkpoint_raise_by_name(tmp_path):
    saved_un(tmp_path)
    load_pretrained(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    changes = {
        r"model\.norm\.running": lambda t: t.pop("model.norm.running"),
        "more": lambda t: t.update(more=torch.zeros(2)),
        r"model\.norm\.weight": lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
    }
    for message, change in changes.items():
        tensors = dict(original)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            fold_dir(tmp_path, tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"hidden_size": "x"}, {"vocab_size": -1}])
def test_a_damaged_configuration_is_a_value_error_that_names_the_folder(change, tmp_path):
    saved_un(tmp_path)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(ValueError, match=f"^{tmp_path}"):
        audit_dir(tmp_path)


def test_statistics_without_specs_raise(tmp_path):
    saved_un(tmp_path)
    for change in (
        lambda config: config["normkit"]["norms"].update({"model.norm": {"is": "unn", "dim": 16}}),
        lambda config: config.update(normkit=[1]),
        lambda config: config.pop("normkit"),
    ):
        edit_config(tmp_path, change)
        with pytest.raises(ValueError, match="normkit"):
            load_pretrained(tmp_path)


# -- what transformers writes, and what it may read ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_folder_saved_by_transformers_loads_with_norms(name, tmp_path):
    case, model = saved_un(tmp_path, name)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(call(case, again), call(case, model), rtol=0, atol=0)
    for each in (model, again):
        each.train()
        for module in each.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        torch.manual_seed(0)
        each(**case.kwargs)
    for key, value in model.state_dict().items():  # after a training forward: masks arrive as before
        torch.testing.assert_close(again.state_dict()[key], value, msg=key)


def test_from_pretrained_raises_for_converted_checkpoints(tmp_path):
    case = case_of("bert")
    model = randomize(convert(case.model, "un")).eval()
    save_pretrained(model, tmp_path / "converted")
    fold_dir(tmp_path / "converted", tmp_path / "folded")
    for folder in ("converted", "folded"):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            type(model).from_pretrained(tmp_path / folder)
    save_pretrained(case.model, tmp_path / "plain")
    torch.testing.assert_close(call(case, type(model).from_pretrained(tmp_path / "plain")), call(case, case.model))


def test_norms_with_activations_come_back_converted(tmp_path):
    import transformers

    config = transformers.BitConfig(embedding_size=32, hidden_sizes=[128, 128], depths=[1, 1])
    original, x = randomize(transformers.BitForImageClassification(config)).eval(), torch.randn(2, 3, 64, 64)
    for name, converted in {"whole": convert(original, "batch"), "part": original}.items():
        if name == "part":
            converted.bit = convert(original.bit, "batch")
        save_pretrained(converted, tmp_path / name)
        again = load_pretrained(tmp_path / name)
        assert [*find(again)] == [*find(converted)]
        assert len(find(again)) == 7
        torch.testing.assert_close(again(x).logits, converted(x).logits)
    folded, report = fold(load_pretrained(tmp_path / "whole"), x, outputs=lambda out: out.logits)
    save_pretrained(folded, tmp_path / "folded")
    again = load_pretrained(tmp_path / "folded")
    torch.testing.assert_close(again(x).logits, converted(x).logits, rtol=1e-5, atol=1e-5)
    assert all(row.action == "multiply-add" for row in report.rows), "weights are standardized in each forward"


def test_every_transform_keeps_the_record(tmp_path):
    case = case_of("llama")
    model = convert(case.model, "un")
    model.train()(**case.kwargs)
    gpt2 = case_of("gpt2")
    models = {
        "calibrated": (case, calibrate(model, [case.kwargs]).eval()),
        "rms": (gpt2, to_rms(gpt2.model, outputs=gpt2.outputs, untie=True, **gpt2.kwargs)[0]),
        "folded": (case, fold(model.eval(), outputs=case.outputs, **case.kwargs)[0]),
    }
    for name, (each, model) in models.items():
        model.save_pretrained(tmp_path / name)
        torch.testing.assert_close(call(each, load_pretrained(tmp_path / name)), call(each, model), msg=name)
    back = convert(convert(case.model, "un"), "rms")
    assert back.config.normkit["norms"]["model.norm"]["is"].startswith("rms")


def test_several_files_and_a_folder_that_is_used_twice(tmp_path):
    case, model = saved_un(tmp_path / "shards")
    model.save_pretrained(tmp_path / "shards", max_shard_size="2KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    torch.testing.assert_close(call(case, load_pretrained(tmp_path / "shards")), call(case, model), rtol=0, atol=0)
    with pytest.raises(ValueError, match="model-"):
        save_pretrained(model, tmp_path / "shards")
    save_pretrained(model, tmp_path / "ours")
    save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="two models"):
        load_pretrained(tmp_path / "ours")
    with pytest.raises(TypeError, match="Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "linear")


SMALL: dict = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL["num_attention_heads"] = 2
GROUPED: dict = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
IDS = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
CONVOLUTIONS: dict = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4}
GATED = {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4}
ARCHITECTURES = {  # class, configuration, spec, input
    "initialized by the name of a norm's class": ("GemmaForCausalLM", GROUPED, "rms", IDS),
    "weights renamed for the class of the model": ("GPTNeoXForCausalLM", SMALL, "un", IDS),
    "types of the norms' weights are read": ("MambaForCausalLM", {**SMALL, "state_size": 4}, "un", IDS),
    "norms with gates": ("Mamba2ForCausalLM", {**SMALL, **GATED}, "un", IDS),
    "layer-scale stays": ("LlamaForCausalLM", SMALL, "power(groups=2)", IDS),
    "weight norm": ("Wav2Vec2Model", {**SMALL, **CONVOLUTIONS, "num_conv_pos_embedding_groups": 2}, "un", SOUND),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_converted_and_folded_models_come_back_from_their_folders(name, tmp_path, monkeypatch):
    import transformers

    kind, config, spec, x = ARCHITECTURES[name]
    original = getattr(transformers, kind)(getattr(transformers, kind).config_class(**config)).eval()
    converted = randomize(convert(original, spec)).eval()
    folded, report = fold(converted, x, outputs=lambda out: out[0])
    assert report.max_error < 1e-9
    for folder, model in (("plain", original), ("converted", converted), ("folded", folded)):
        save_pretrained(model, tmp_path / folder)
        again = load_pretrained(tmp_path / folder)
        torch.testing.assert_close(again(x)[0], model(x)[0], rtol=0, atol=0)
    if (tmp_path / "folded/load.py").exists():
        monkeypatch.syspath_prepend(str(tmp_path / "folded"))
        monkeypatch.delitem(sys.modules, "load", raising=False)  # of another folder
        load = importlib.import_module("load")
        torch.testing.assert_close(load.model()(x)[0], folded(x)[0], rtol=0, atol=0)


TIED = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                                               "num_attention_heads": 2}),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1,
                                                            "num_heads": 2}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {
        f"{part}_{name}": number for part in ("encoder", "decoder")
        for name, number in (("layers", 1), ("ffn_dim", 24), ("attention_heads", 2))
    } | {"d_model": 16, "max_position_embeddings": 64}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "transform"), [*((name, fold) for name in TIED), ("gpt2", to_rms)])
def test_an_output_layer_that_was_untied_stays_so(name, transform, tmp_path):
    import transformers

    kind, config, size = TIED[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=40, **size))
    model = randomize(model).eval()
    given = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :4]} if name in ("umt5", "bart") else {})
    expected, before = model(**given).logits, (model.config.to_dict(), dict(model.all_tied_weights_keys))
    changed, _ = transform(model, outputs=lambda out: out.logits, untie=True, **given)
    assert before == (model.config.to_dict(), model.all_tied_weights_keys)
    assert "_tied_weights_keys" not in vars(model)
    ties_others = name in ("umt5", "bart")  # whose encoder and decoder share an embedding
    assert (changed.config.tie_word_embeddings, bool(changed.all_tied_weights_keys)) == (ties_others, ties_others)

    def check(other, size=40):
        torch.testing.assert_close(other.eval()(**given).logits[..., :size], expected, rtol=1e-4, atol=1e-5)

    changed.tie_weights()
    check(changed)
    save_pretrained(changed, tmp_path)
    check(load_pretrained(tmp_path))
    if transform is fold:
        model.save_pretrained(tmp_path / "model")
        if name == "bart":
            with pytest.raises(ValueError, match="without --untie"):
                fold_dir(tmp_path / "model", tmp_path / "folded", untie=True)
        else:
            fold_dir(tmp_path / "model", tmp_path / "folded", untie=True)
            again = getattr(transformers, kind).from_pretrained(tmp_path / "folded")
            if name != "umt5":  # whose class ties them at each chance
                again.tie_weights()
            check(again)
    changed.resize_token_embeddings(47, mean_resizing=False)
    check(changed)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_sentence_transformers_reads_stays(name, tmp_path):
    import transformers

    kind, config, size = TIED[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=40, tie_word_embeddings=False, **size))
    randomize(model).eval().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "modules.json").write_text("[]")
    fold_dir(tmp_path / "model", tmp_path / "folded")
    found = [transformers.AutoModel.from_pretrained(tmp_path / each).eval()(IDS)[0] for each in ("model", "folded")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_text_configuration_inside_another_is_untied_too():
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.Qwen2Config(vocab_size=40, num_key_value_heads=2, tie_word_embeddings=True, **size)
    vision = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **size)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=39)
    config.tie_word_embeddings = True
    model = transformers.LlavaForConditionalGeneration(config).eval()
    changed, _ = fold(model, input_ids=IDS - 1, outputs=lambda out: out.logits, untie=True)
    assert (changed.config.tie_word_embeddings, changed.config.text_config.tie_word_embeddings) == (False, False)
    assert model.config.text_config.tie_word_embeddings
    assert changed.lm_head.weight is not changed.get_input_embeddings().weight


def test_an_example_without_a_cache_is_called_without_one():
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config = transformers.DeepseekV2Config(vocab_size=40, first_k_dense_replace=1, **size, **latent)
    model = randomize(transformers.DeepseekV2ForCausalLM(config)).eval()
    folded, report = fold(model, input_ids=IDS, outputs=lambda out: out.logits)
    assert report.added == ("use_cache=False",)
    assert report.count("gain folded") == len(report)
    first = folded(input_ids=IDS[:, :4], use_cache=True)
    kept = "cache" if "cache" in first else "past_key_values"  # transformers 5.24 renamed it
    second = folded(input_ids=IDS[:, 4:], **{kept: first[kept]})
    torch.testing.assert_close(second.logits, model(IDS).logits[:, 4:], rtol=1e-4, atol=1e-5)
    _, report = fold(model, input_ids=IDS, outputs=lambda out: out.logits, use_cache=True)
    assert not report.added


class Half(LayerNorm):
    """A norm of the user's, which computes something else."""

    def forward(self, x, mask=None):
        return 0.5 * super().forward(x, mask)


@pytest.mark.parametrize("kind", [Half, type("Own", (torch.nn.LayerNorm,), {})])
def test_a_class_derived_from_a_norm_is_not_saved_as_that_norm(kind, tmp_path):
    model = case_of("gpt2").model
    model.transformer.ln_f = kind(model.transformer.ln_f.normalized_shape[0])
    with pytest.raises(ValueError, match=f"ln_f.*{kind.__name__}"):
        save_pretrained(model, tmp_path / "model")


def test_files_in_the_place_of_a_folder_and_of_another_model(tmp_path):
    model = convert(case_of("gpt2").model, "un").eval()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="is a file"):
        save_pretrained(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    save_pretrained(case_of("gpt2").model.eval(), tmp_path)
    assert sorted(file.name for file in tmp_path.glob("model*")) == ["model.safetensors"]


def test_a_full_disk_leaves_what_was_there(tmp_path, capsys):
    model = convert(case_of("gpt2").model, "un").eval()
    with pytest.raises(Exception, match=r"(?i)too large"), full_disk():
        save_pretrained(model, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    save_pretrained(model, tmp_path / "old")
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    with pytest.raises(Exception, match=r"(?i)too large"), full_disk():
        save_pretrained(model, tmp_path / "old")
    with full_disk():
        assert main(["fold", str(tmp_path / "old"), "--out", str(tmp_path / "folded")]) == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()][1:] == ["normkit"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()} == before
