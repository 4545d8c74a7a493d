"""`remove_norms` and `normkit remove-norms`: models lose their norms, by training or within a budget."""

import csv
import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchvision_stub import load_torchvision

import normkit
from normkit.cli import main
from normkit.models.first_token import Clamp, keep_first_token
from normkit.models.scale_loss import scale_deviation
from normkit.norms import Norm
from normkit.removal import remove
from normkit.removal.folders import longest
from normkit.removal.large_tokens import clamp_writers, large_first_token
from normkit.removal.texts import split

load_torchvision()
WORDS = [f"w{number}" for number in range(40)]


class Encoder(nn.Module):
    """A pre-norm Transformer that returns vectors."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(self.embed(x))


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    model = Encoder()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    batches = [torch.randint(0, 30, (16, 12)) for _ in range(30)]
    return model, batches


def test_training_brings_the_folded_model_near_the_original(encoder):
    model, batches = encoder
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held_out, stages = [torch.randint(0, 30, (16, 12)) for _ in range(4)], []
    folded, report = normkit.remove_norms(
        model, batches, steps=60, lr=1e-3, held_out=held_out, on_progress=lambda *given: stages.append(given)
    )
    assert report.fold.foldable == "5 of 5"
    assert not any(isinstance(module, nn.LayerNorm | Norm) for module in folded.modules())
    assert report.scores["original"] < 1e-6
    assert report.scores["without norms"] < 0.5 * report.scores["fitted"]
    with torch.no_grad():
        mine, theirs = (each.eval()(held_out[0]).mean(1) for each in (folded, model))
    assert 1 - nn.functional.cosine_similarity(mine, theirs).mean() < 3 * report.scores["without norms"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ("fitting norm", 5, 5) in [stage[:3] for stage in stages]
    assert all(left < 600 for stage, done, _, left in stages if stage == "training, step" and done > 1)


def test_a_continued_training_ends_with_the_same_weights(encoder, tmp_path, monkeypatch):
    model, batches = encoder
    monkeypatch.setattr("normkit.removal.distill.SAVE_EVERY", 3)

    def stop(stage, done, of, left):
        if stage == "training, step" and done == 5:
            raise KeyboardInterrupt

    whole, _ = normkit.remove_norms(model, batches, steps=8)
    with pytest.raises(KeyboardInterrupt):
        normkit.remove_norms(model, batches, steps=8, checkpoint=tmp_path / "c.pt", on_progress=stop)
    steps = []
    parts, _ = normkit.remove_norms(
        model, batches, steps=8, checkpoint=tmp_path / "c.pt",
        on_progress=lambda stage, done, *_: steps.append(done) if stage == "training, step" else None,
    )  # fmt: skip
    assert steps == [4, 5, 6, 7, 8]
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())


def test_with_labels_statistics_are_of_batches_and_calibrated(encoder):
    model, batches = encoder
    model = nn.Sequential(model, nn.Linear(16, 3))
    seen = []

    def loss(model, x):
        seen.append({module.training for module in model.modules() if isinstance(module, Norm)})
        return nn.functional.cross_entropy(model(x).flatten(0, 1), (x % 3).flatten())

    score = lambda model: float(loss(model, batches[0]).detach())  # noqa: E731
    _, report = normkit.remove_norms(model, batches, steps=40, lr=3e-3, loss=loss, score=score, unit="nats")
    assert seen[3] == {True}
    assert report.scores["without norms"] < report.scores["original"]


def language_model(outlier: float, token: int = 1):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=45, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data[token] *= outlier
    return model


def first_tokens(count):
    return [{"input_ids": torch.randint(3, 45, (8, 24)).index_fill_(1, torch.tensor([0]), 1)} for _ in range(count)]


def test_a_budget_keeps_the_norms_that_a_huge_first_token_makes_expensive():
    found = {}
    for outlier in (1, 300):
        model, batches = language_model(outlier), first_tokens(6)
        held_out = first_tokens(2)
        folded, report = normkit.remove_norms(model, batches, budget=0.3, held_out=held_out)
        gone = {cost.norm for cost in report.costs if cost.gone}
        assert [cost.norm for cost in report.costs][1:7:2] == [
            f"model.layers.{n}.post_attention_layernorm" for n in range(3)
        ]
        assert report.rise <= 0.3 + 1e-4
        assert all(cost.alone <= 0.3 for cost in report.costs if cost.gone)
        assert {name for name, module in folded.named_modules() if isinstance(module, nn.Identity)} >= gone
        with torch.no_grad():  # the score is that of the folded model
            pairs = [[m(**b).logits.log_softmax(-1) for m in (folded, model)] for b in held_out]
        rise = torch.stack([(theirs.exp() * (theirs - mine)).sum(-1) for mine, theirs in pairs]).mean()
        assert report.rise == pytest.approx(float(rise), abs=1e-5)
        assert report.forwards >= len(report.costs)
        found[outlier] = report
    assert sum(cost.gone for cost in found[1].costs) >= 1
    most = {outlier: max(cost.alone for cost in report.costs) for outlier, report in found.items()}
    assert sum(cost.gone for cost in found[300].costs) < sum(cost.gone for cost in found[1].costs)
    assert most[300] > 2 * most[1]


def test_a_large_first_token_is_found_and_its_constant_keys_make_norms_removable():
    assert large_first_token(language_model(1), first_tokens(2)) is None
    model, batches = language_model(300), first_tokens(6)
    weight = model.model.embed_tokens.weight.data
    weight[3:] = 12 * nn.functional.normalize(weight[3:])  # all others are of one size
    found = large_first_token(model, batches)
    assert found.norm == "model.layers.0.input_layernorm"
    assert found.ratio > 20
    _, without = normkit.remove_norms(model, batches, budget=1e9, held_out=batches[:2])
    keep_first_token(model, 1)
    rest = [{"input_ids": batch["input_ids"][:, 1:]} for batch in batches]
    folded, report = normkit.remove_norms(model, rest, budget=1e9, held_out=rest[:2], clamp=True)
    assert report.fold.foldable == "7 of 7"
    assert report.rise < 0.3 * without.rise
    assert sum(isinstance(module, Clamp) for module in folded.modules()) == 7


def test_a_clamped_model_is_trained_block_by_block_and_continues_behind_the_last_block(tmp_path):
    model, batches = language_model(300), first_tokens(6)
    keep_first_token(model, 1)
    rest = [{"input_ids": batch["input_ids"][:, 1:]} for batch in batches]
    held_out = [{"input_ids": batch["input_ids"][:, 1:]} for batch in first_tokens(2)]

    def stop(stage, done, of, left):
        if stage == "training blocks, step" and done == 30:
            raise KeyboardInterrupt

    given = {"steps": 20, "lr": 1e-2, "clamp": True, "held_out": held_out}
    folded, report = normkit.remove_norms(model, rest, **given)
    assert report.fold.foldable == "7 of 7"
    assert report.rise < 0.8 * (report.scores["fitted"] - report.scores["original"])
    with pytest.raises(KeyboardInterrupt):
        normkit.remove_norms(model, rest, **given, checkpoint=tmp_path / "c.pt", on_progress=stop)
    steps = []
    again, _ = normkit.remove_norms(
        model, rest, **given, checkpoint=tmp_path / "c.pt",
        on_progress=lambda stage, done, *_: steps.append(done) if stage == "training blocks, step" else None,
    )  # fmt: skip
    assert steps == list(range(21, 61))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in folded.state_dict().items())


def test_a_clamped_model_is_trained_with_the_scale_loss(monkeypatch):
    model, batches = language_model(300), first_tokens(2)
    keep_first_token(model, 1)
    rest = [{"input_ids": batch["input_ids"][:, 1:]} for batch in batches]
    unequal = []
    for weight in (0.0, 1.0):
        monkeypatch.setattr(remove, "SCALES", weight)
        folded, _ = normkit.remove_norms(model, rest, steps=10, lr=1e-2, clamp=True)
        stream = folded(**rest[0], output_hidden_states=True).hidden_states[-1]
        unequal.append(float(scale_deviation(stream, None).detach()))
    assert unequal[1] < 0.95 * unequal[0]


def test_layers_that_write_large_tokens_are_clamped_to_what_they_write_for_others():
    model, batches = language_model(1), [{"input_ids": torch.randint(3, 45, (8, 24))} for _ in range(2)]
    down, special = model.model.layers[0].mlp.down_proj, 7
    for batch in batches:
        batch["input_ids"][:, 5] = special

    def write(module, args, y):  # large for one token
        return torch.where((batch_ids[0] == special)[..., None], 100 * y, y)

    batch_ids = [batches[0]["input_ids"]]
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: batch_ids.__setitem__(0, kwargs["input_ids"]), with_kwargs=True
    )
    down.register_forward_hook(write)
    assert clamp_writers(model, batches) == ["model.layers.0.mlp.down_proj"]
    assert clamp_writers(model, batches) == []


@pytest.mark.parametrize(
    ("given", "name"),
    [({"steps": 0}, "steps"), ({"lr": float("nan")}, "lr"), ({"budget": -1}, "budget"),
     ({"steps": 5, "budget": 0.1}, "steps")],
)  # fmt: skip
def test_wrong_arguments_raise(given, name, encoder):
    with pytest.raises(ValueError, match=name):
        normkit.remove_norms(*encoder, **given)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path, chance = tmp_path_factory.mktemp("text") / "text.txt", random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=chance.randint(4, 9))) + "." for _ in range(600)]
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


def saved(kind, folder, outlier=1):
    transformers = pytest.importorskip("transformers")
    (folder / "1_Pooling").mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf8")
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=48).save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "LlamaForCausalLM":
        language_model(outlier, 2).save_pretrained(folder)  # [CLS], which the tokenizer puts before every text
        return folder
    config = transformers.BertConfig(
        vocab_size=45, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    kinds = "sentence_transformers.models."
    rows = [{"idx": int(n), "name": n, "path": path, "type": kinds + name} for n, path, name in modules]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


LOADS = """
import sys
sys.modules["torchvision"] = None  # its build may not fit this torch
import torch, transformers
folder, auto, sentences = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
model.save_pretrained(f"{folder}/again")  # as Trainer does
again = getattr(transformers, auto).from_pretrained(f"{folder}/again", trust_remote_code=True).eval()
with torch.no_grad():
    found = [each(input_ids=torch.tensor([[2, 7, 9, 3]]))[0] for each in (model, again)]
    if sentences == "True":
        from sentence_transformers import SentenceTransformer
        model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
        found.append(model.encode(["w1 w3."], convert_to_tensor=True))
assert "normkit" not in sys.modules
torch.save(found, f"{folder}/found.pt")
"""


def test_factors_that_integers_cannot_hold_are_told_before_the_training(monkeypatch):
    monkeypatch.setattr(remove, "UNEVEN", 1e-9)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="multiply_adds"):
        normkit.remove_norms(model, [torch.randn(8, 4) for _ in range(2)], steps=1)


def check_without_normkit(out, model, auto, sentences=False):
    """Transformers and SentenceTransformer, in a process without normkit, give what the model gives."""
    environment = {**os.environ, "HF_HOME": str(out.parent / "hf"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", LOADS, str(out), auto, str(sentences)], check=True, env=environment)
    found = torch.load(out / "found.pt")
    with torch.no_grad():
        for each in found[:2]:
            torch.testing.assert_close(each, model(input_ids=torch.tensor([[2, 7, 9, 3]]))[0], rtol=1e-4, atol=1e-5)
        if sentences:
            ids = torch.tensor([[2, 6, 8, 1, 3]])  # "." is unknown
            torch.testing.assert_close(found[2][0], model(input_ids=ids)[0].mean(1)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "LlamaForCausalLM"])
def test_a_folder_loses_its_norms_and_stays_a_drop_in(kind, text, tmp_path, capsys):
    folder, out = saved(kind, tmp_path / "model"), tmp_path / "out"
    words = ["remove-norms", folder, "--text", text, "--second", text, "--steps", 4, "--out", out]
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    assert printed.err
    assert max(map(len, printed.out.replace(str(tmp_path), "").splitlines())) <= 120
    names = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and "model.safe" not in file.name]
    assert all((out / name).is_file() for name in names)
    assert not (out / ".removal").exists()
    model = normkit.load_pretrained(out)
    assert not any("Norm" in type(module).__name__ for module in model.modules())
    kept = json.loads((out / "removal.json").read_text())
    assert {row["text"] for row in kept["rows"]} == {"held out", "second text"}
    if kind == "LlamaForCausalLM":
        assert set(kept["rows"][0]) == {"text", "positions", "perplexity", "original", "same next"}
        assert len(kept["samples"]) == 3
        assert "}.input_layernorm " in kept["fold"], "norms have their names, not those of a clamp and a norm"
        check_without_normkit(out, model, "AutoModelForCausalLM")
    else:
        assert [row["tokens"] for row in kept["rows"][:2]] == sorted(row["tokens"] for row in kept["rows"][:2])
        check_without_normkit(out, model, "AutoModel", importlib.util.find_spec("sentence_transformers") is not None)


def test_the_length_is_the_folders(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = saved("BertModel", tmp_path / "model")
    given = (folder, normkit.load_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder))
    assert longest(*given) == 32
    (folder / "sentence_bert_config.json").unlink()
    assert longest(*given) == 48
    given[2].model_max_length = 10**30
    assert longest(*given) == 64


@pytest.mark.parametrize("number", [1, 11, 25, 40, 199, 200, 1000])
def test_a_tenth_of_a_text_is_held_out(number):
    lines = [str(i) for i in range(number)]
    mine, held_out = split(lines)
    assert sorted(mine + held_out) == sorted(lines)
    assert len(held_out) == -(-number // 10)


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [("org/name", [], "hf download org/name"), ("model", ["--text", "wikitext-2"], "--text wikitext-2"),
     ("model", ["--out", "model"], "model itself"), ("model", ["--resume"], "--resume"),
     ("model", ["--text", "short.txt"], "give more lines"), ("model", ["--length", "9999"], "9999")],
)  # fmt: skip
def test_bad_input_is_one_line_with_a_remedy(model, words, message, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("BertModel", tmp_path / "model")
    (tmp_path / "short.txt").write_text("one line\n")
    assert main(["remove-norms", model, "--text", str(text), "--out", "out", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_budget_writes_the_costs_by_depth_and_a_large_first_token_keeps_its_keys(text, tmp_path):
    folder, out = saved("LlamaForCausalLM", tmp_path / "model", 300), tmp_path / "out"
    words = ["remove-norms", folder, "--text", text, "--budget", 0.5, "--length", 24, "--out", out]
    assert main([str(word) for word in words]) == 0
    rows = list(csv.DictReader((out / "costs.csv").read_text().splitlines()))
    assert [int(row["depth"]) for row in rows] == list(range(7))
    kept, model = json.loads((out / "removal.json").read_text()), normkit.load_pretrained(out)
    assert "[CLS]" in kept["about"]
    scores = kept["removal"]["scores"]
    assert scores["without norms"] - scores["original"] <= 0.5 + 1e-4
    modules = dict(model.named_modules())
    for row in rows:
        assert (row["gone"] == "yes") == ("Norm" not in type(modules[row["norm"]]).__name__)
    assert {row["gone"] for row in rows} >= {"yes"}
    ids = torch.tensor([[7, 9, 12], [0, 5, 8]])
    mask = (ids > 0).long()
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    for row, start in zip(made, (0, 1), strict=True):
        with torch.no_grad():
            found = model(input_ids=row[None, start:]).logits[0].argmax(-1)
        assert torch.equal(found[2 - start : -1], row[3:])  # padding on the left changes nothing
    check_without_normkit(out, model, "AutoModelForCausalLM")
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(out)("w1")["input_ids"] == [6]
