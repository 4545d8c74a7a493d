"""Model folders of Hugging Face: folded, saved, loaded again without normkit; whatever is unsafe is refused."""

import json
import subprocess
import sys

import pytest
import torch
from third_party_models import case_of, randomize

from normkit.norms import Norm
from normkit.transforms import convert
from normkit.transforms.huggingface import (
    audit_dir,
    example_for,
    fold_dir,
    is_pretrained_dir,
    load_pretrained_dir,
    save_pretrained_dir,
)

pytest.importorskip("transformers")
FOLDED = {
    "llama": "5 of 5",
    "gpt2": "5 of 5",
    "hf_vit": "5 of 5",
    "t5": "12 of 12",
    "bert": "3 of 6",
    "gemma": "5 of 5",
}


def call(case, model):
    with torch.no_grad():
        return case.outputs(model(*case.args, **case.kwargs))


@pytest.mark.parametrize("name", FOLDED)
def test_a_converted_model_goes_to_disk_folds_there_and_computes_the_same(name, tmp_path):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    save_pretrained_dir(model, tmp_path / "model")
    assert is_pretrained_dir(tmp_path / "model")
    again = load_pretrained_dir(tmp_path / "model")
    torch.testing.assert_close(call(case, again), call(case, model), rtol=0, atol=0)
    report = fold_dir(tmp_path / "model", tmp_path / "folded")
    assert report.foldable == FOLDED[name]
    assert report.max_error < 1e-12
    assert audit_dir(tmp_path / "model").rows == report.rows
    folded = load_pretrained_dir(tmp_path / "folded")
    assert not any(isinstance(module, Norm) for module in folded.modules())
    torch.testing.assert_close(call(case, folded), call(case, model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_folded_folder_loads_and_runs_without_normkit(name, tmp_path):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    save_pretrained_dir(model, tmp_path / "model")
    fold_dir(tmp_path / "model", tmp_path / "folded")
    torch.save((case.kwargs, call(case, model)), tmp_path / "example.pt")
    code = f"""
import sys
sys.path.insert(0, r"{tmp_path}/folded")
sys.modules["torchvision"] = None  # transformers does without; its build may not fit this torch
import torch, load
model = load.model()
kwargs, logits = torch.load(r"{tmp_path}/example.pt")
with torch.no_grad():
    torch.testing.assert_close(model(**kwargs).logits, logits, rtol=1e-4, atol=1e-5)
assert not any(name.startswith("normkit") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_folder_as_transformers_saves_it_folds_its_gains(tmp_path):
    case = case_of("llama")
    case.model.save_pretrained(tmp_path / "model")
    report = fold_dir(tmp_path / "model", tmp_path / "folded")
    assert report.count("gain folded") == 5
    again = load_pretrained_dir(tmp_path / "folded")
    torch.testing.assert_close(call(case, again), call(case, case.model), rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "folded" / "load.py").exists(), "norms are left that transformers' class would not have"


def test_half_precision_comes_back_as_it_was(tmp_path):
    model = randomize(convert(case_of("llama").model, "un")).eval().bfloat16()
    save_pretrained_dir(model, tmp_path)
    again = load_pretrained_dir(tmp_path)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert again.model.norm.running.dtype == torch.float32


@pytest.mark.parametrize("name", ["bert", "bart", "hf_vit", "hf_swin", "t5", "roberta"])
def test_examples_are_made_from_the_configuration(name):
    model = case_of(name).model
    example = example_for(model)
    with torch.no_grad():
        assert model(**example.kwargs).logits.isfinite().all()


def test_bad_folders_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        load_pretrained_dir(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_pretrained_dir(tmp_path)
    config = {"model_type": "llama"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert not is_pretrained_dir(tmp_path)
    with pytest.raises(ValueError, match="names no architecture"):
        load_pretrained_dir(tmp_path)
    config["architectures"] = ["LlamaForCausalLM"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds no weights"):
        load_pretrained_dir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickles \(pytorch_model\.bin\).*refused.*safetensors"):
        load_pretrained_dir(tmp_path)
    path.write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ValueError, match=r"its own code \(evil\.Model\), which is not run"):
        load_pretrained_dir(tmp_path)
    path.write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="quantized weights"):
        load_pretrained_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    path.write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ValueError, match="has no class NoSuchModel"):
        load_pretrained_dir(tmp_path)
    with pytest.raises(ValueError, match="name another folder"):
        fold_dir(tmp_path, tmp_path)


def test_weights_that_do_not_fit_the_changes_are_refused(tmp_path):
    model = randomize(convert(case_of("llama").model, "un")).eval()
    save_pretrained_dir(model, tmp_path)
    changes = json.loads((tmp_path / "normkit.json").read_text())
    changes["norms"]["model.norm"] = {"is": "identity"}
    (tmp_path / "normkit.json").write_text(json.dumps(changes))
    with pytest.raises(ValueError, match=r"do not fit normkit\.json"):
        load_pretrained_dir(tmp_path)
