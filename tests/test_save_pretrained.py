"""Models and places that `save_pretrained` refuses."""

import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from third_party_models import case_of

import normkit
from normkit.models import convert, save_pretrained

pytest.importorskip("transformers")


class Half(normkit.LayerNorm):
    """A norm of the user's, which computes something else."""

    def forward(self, x, mask=None):
        return 0.5 * super().forward(x, mask)


@pytest.mark.parametrize("kind", [Half, type("Own", (torch.nn.LayerNorm,), {})])
def test_a_class_derived_from_a_norm_is_not_saved_as_that_norm(kind, tmp_path):
    model = case_of("gpt2").model
    model.transformer.ln_f = kind(model.transformer.ln_f.normalized_shape[0])
    with pytest.raises(ValueError, match=f"ln_f is a {kind.__name__}"):
        save_pretrained(model, tmp_path / "model")


def test_a_file_in_the_place_of_the_folder_raises(tmp_path):
    (tmp_path / "model").write_text("kept")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        save_pretrained(convert(case_of("gpt2").model, "un"), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "kept"


@contextmanager
def full_disk(size=4000):
    """A limit on the size of files within the block, as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    model = convert(case_of("gpt2").model, "un").eval()
    with pytest.raises(Exception, match=r"(?i)too large"), full_disk():
        save_pretrained(model, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    save_pretrained(model, tmp_path / "old")
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    with pytest.raises(Exception, match=r"(?i)too large"), full_disk():
        save_pretrained(model, tmp_path / "old")
    assert {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()} == before


def test_a_model_replaces_the_shards_of_another(tmp_path):
    model = case_of("gpt2").model.eval()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    save_pretrained(model, tmp_path)
    assert sorted(file.name for file in tmp_path.glob("model*")) == ["model.safetensors"]


def test_folded_models_of_transformers_with_gates_load_with_normkit(tmp_path):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4}
    model = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(vocab_size=20, num_hidden_layers=1, use_cache=False, **sizes)
    )
    tokens = torch.arange(8).view(2, 4)
    new = normkit.convert(model, "un").train()
    new(tokens, labels=tokens).loss.backward()
    folded, report = normkit.fold(new.eval(), tokens, outputs=lambda out: out.logits)
    assert report.foldable == "3 of 3", str(report)
    normkit.save_pretrained(folded, tmp_path)
    assert not (tmp_path / "load.py").exists()  # it would need GatedNorm
    assert torch.equal(normkit.load_pretrained(tmp_path)(tokens).logits, folded(tokens).logits)
