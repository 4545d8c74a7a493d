"""Models and places that `save_pretrained` refuses."""

import pytest
import torch
from third_party_models import case_of

import normkit
from normkit.transforms import convert, save_pretrained

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
