"""`normkit remove-norms`: runs and Hugging Face models lose their norms."""

import dataclasses
import json
import math
import random
import signal

import pytest
import torch
from normkit_papers.cli import main
from normkit_papers.models.config import Model
from normkit_papers.train import removal
from normkit_papers.train.config import Run
from normkit_papers.train.distill import Distillation, Outputs, captured
from normkit_papers.train.fit import fit
from normkit_papers.train.folder import load
from normkit_papers.train.removable import RemovableText
from normkit_papers.train.removal import FILE, Removal, remove_norms
from normkit_papers.train.run import train
from safetensors.torch import load_file
from third_party_models import randomize

from normkit.models import calibrate, convert, load_pretrained
from normkit.norms import LayerNorm, StatNorm

RUN = Run(
    name="g2p", task="g2p", data="cmudict", steps=40,
    model=Model(width=16, hidden=24, depth=1, heads=2, tie=False, max_length=64),
    batch_tokens=200, lr=3e-3, warmup=4, test_items=20, valid_items=40, record_every=0, threads=1,
)  # fmt: skip
WORDS = [f"w{number}" for number in range(40)]


DIGITS = Run(
    name="digits", task="digits", data="digits", steps=40, batch_tokens=32, record_every=0, threads=1,
    model=Model(width=16, hidden=16, depth=1, heads=2, dropout=0.1),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(DIGITS, folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path, chance = tmp_path_factory.mktemp("text") / "text.txt", random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=chance.randint(4, 9))) for _ in range(600)]
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


@pytest.fixture(scope="module", params=["bert", "bert of texts", "gpt2"])
def pretrained(request, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf8")
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), chat_template="{{ messages }}").save_pretrained(folder)
    torch.manual_seed(0)
    if request.param.startswith("bert"):
        config = transformers.BertConfig(
            vocab_size=len(vocabulary), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=64,
        )  # fmt: skip
        kind = "BertModel" if request.param == "bert" else "BertForSequenceClassification"
        model = getattr(transformers, kind)(config)
    else:
        config = transformers.GPT2Config(vocab_size=len(vocabulary), n_embd=8, n_layer=1, n_head=2, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
    randomize(model).save_pretrained(folder)
    return folder


MIXED = dataclasses.replace(
    DIGITS, model=dataclasses.replace(DIGITS.model, norm_at={"*final_norm": "nonorm", "*feedforward_norm": "rms"})
)


CARRIED = Run(  # other numbers of texts side by side in training, validation and test
    name="lm", task="lm", data="pydoc", steps=2, batch_tokens=64, context=16, test_context=200, record_every=0,
    model=Model(width=8, hidden=8, depth=1, heads=2, attention="relative", memory=4), threads=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "settings", "norms"),
    [("outputs", DIGITS, 3), ("outputs", MIXED, 3), ("task", RUN, 7), ("outputs", CARRIED, 3)],
)
def test_a_run_loses_its_norms_and_the_report_compares(loss, settings, norms, tmp_path, capsys):
    train(settings, tmp_path / "run")
    words = ["remove-norms", tmp_path / "run", "--steps", 4, "--loss", loss, "--unfolded", "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    assert f"{norms} of {norms} norms fold away" in printed
    folded = load(tmp_path / "out").model
    assert not any(isinstance(module, LayerNorm | StatNorm) for module in folded.modules())
    found = json.loads((tmp_path / "out" / FILE).read_text())
    stages = ["original", "fitted", "without norms", *(["original, trained likewise"] if loss == "task" else [])]
    assert list(found["quality"]) == stages
    for stage in found["tail"]:
        tail = found["tail"][stage]
        assert tail["mean"] < tail["99.9 %"] <= tail["maximum"]
        assert stage in printed
    assert not (tmp_path / "out" / ".removal").exists()
    unfolded = load(tmp_path / "out" / "unfolded").model
    assert sum(isinstance(module, StatNorm) for module in unfolded.modules()) == norms


def test_a_pretrained_model_loses_its_norms(pretrained, text, tmp_path):
    removed = remove_norms(pretrained, tmp_path / "out", Removal(steps=5, text=str(text), lr=1e-3, unfolded=True))
    model, unfolded = (load_pretrained(folder) for folder in (tmp_path / "out", tmp_path / "out" / "unfolded"))
    assert any(isinstance(module, StatNorm) for module in unfolded.modules())
    tokens = {"input_ids": torch.tensor([[2, 7, 9, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    torch.testing.assert_close(model(**tokens)[0], unfolded(**tokens)[0], rtol=1e-4, atol=1e-5)
    assert not any("LayerNorm" in type(module).__name__ for module in model.modules())
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (pretrained / name).read_bytes(), "it cuts texts of training"
    quality, tail_of = {
        "BertModel": ({"cosine": 1, "worst 1 %": 1, "neighbours %": 100}, "1 - cosine of a held-out token"),
        "BertForSequenceClassification": ({"divergence": 0}, "divergence of a held-out text"),
        "GPT2LMHeadModel": ({"loss": removed.quality["original"].get("loss")}, "loss of a held-out token"),
    }[type(model).__name__]
    assert removed.quality["original"] == pytest.approx(quality, abs=1e-6)
    assert removed.tail_of == tail_of
    with pytest.raises(ValueError, match="holds a finished removal"):
        remove_norms(pretrained, tmp_path / "out", Removal(steps=5, text=str(text)), resume=True)


@pytest.mark.parametrize("loss", ["outputs", "task"])
def test_a_resumed_removal_goes_on_with_the_memory_that_it_stopped_with(loss, tmp_path):
    train(CARRIED, tmp_path / "run")
    settings = Removal(steps=4, loss=loss, lr=0.1)
    remove_norms(tmp_path / "run", tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        remove_norms(tmp_path / "run", tmp_path / "parts", settings, on_progress=lambda _, progress: progress.step == 2)
    remove_norms(tmp_path / "run", tmp_path / "parts", settings, resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_an_interrupted_removal_resumes_to_the_same_weights(run, tmp_path):
    settings = Removal(steps=6, loss="task", lr=1e-3)
    remove_norms(run, tmp_path / "whole", settings)

    def stop(stage, progress):
        return progress.stage == "training" and progress.step == 3 and stage == "without norms"

    on_interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        remove_norms(run, tmp_path / "parts", settings, on_progress=stop)
    assert signal.getsignal(signal.SIGINT) is on_interrupt, "Lightning ignores further interrupts"
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="an interrupted removal; continue it with --resume"):
        remove_norms(run, tmp_path / "parts", settings)
    with pytest.raises(ValueError, match="no interrupted removal to resume"):
        remove_norms(run, tmp_path / "other", settings, resume=True)
    with pytest.raises(ValueError, match="an interrupted removal with another steps"):
        remove_norms(run, tmp_path / "parts", dataclasses.replace(settings, steps=7), resume=True)
    seen = []
    remove_norms(run, tmp_path / "parts", settings, resume=True, on_progress=lambda s, p: seen.append((s, p.step)))
    assert ("without norms", 4) in seen
    assert ("without norms", 3) not in seen
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize(("statistics", "moved"), [(None, True), ("frozen", False)])
def test_the_task_trains_on_the_statistics_of_batches(statistics, moved, run, tmp_path, monkeypatch):
    seen = []

    def spy(model, *args, frozen, **kwargs):
        seen.append(frozen)
        fit(model, *args, frozen=frozen, **kwargs)
        norms = [module for module in model.modules() if isinstance(module, StatNorm)]
        assert all((int(norm.step) > 0) == moved for norm in norms)

    monkeypatch.setattr(removal, "fit", spy)
    remove_norms(run, tmp_path / "out", Removal(steps=3, loss="task", statistics=statistics))
    assert seen == [not moved] * 2


def test_distillation_brings_outputs_and_inner_activations_closer():
    torch.manual_seed(0)
    original = randomize(torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.LayerNorm(6), torch.nn.Linear(6, 5)
    )).eval()  # fmt: skip
    data = [torch.randn(8, 4, 6) for _ in range(30)]
    model = calibrate(convert(original, "un"), data[:4], like=original)
    running = model[2].running.clone()
    for logits in (True, False):
        loss = Distillation(original, lambda m, x, logits=logits: Outputs(m(x), None, logits), ["2"])
        assert float(loss(original, data[0]).detach()) < 1e-6
        before = sum(float(loss(model, x).detach()) for x in data)
        fit(model, loss, lambda start: iter(3 * data), steps=90, lr=1e-2)
        assert sum(float(loss(model, x).detach()) for x in data) < 0.9 * before
    assert torch.equal(model[2].running, running), "statistics stay"


def test_rows_of_embeddings_take_the_scale_of_a_norm_that_alone_reads_them(pretrained, text):
    subject = RemovableText(pretrained, str(text))
    with torch.no_grad():
        table = subject.model.eval().get_input_embeddings().weight
        table *= torch.linspace(0.5, 4, len(table))[:, None]
        for name, parameter in subject.model.named_parameters():
            if "position" in name or "token_type" in name or "wpe" in name:
                parameter.mul_(0.05)  # small beside the table
    batches = [batch for batch, _ in zip(subject.batches(0), range(4), strict=False)]
    student = subject.student(batches)
    assert not student.get_input_embeddings().weight.requires_grad
    if subject.causal:  # the residual stream reads GPT-2's embeddings, too
        assert torch.equal(student.get_input_embeddings().weight, table)
        return

    def error(model):
        fitted = calibrate(convert(model, "un", mask_from="attention_mask"), batches, like=subject.model)
        site = next(name for name, _ in fitted.named_modules() if name.endswith("embeddings.LayerNorm"))
        with torch.no_grad(), captured(fitted, [site]) as mine, captured(subject.model, [site]) as wanted:
            [model(**batches[0]) for model in (fitted, subject.model)]
        real = batches[0]["attention_mask"].bool()
        return float((mine[0][0] - wanted[0][0])[real].square().mean())

    assert error(student) < 0.2 * error(subject.model)


def test_bad_input_raises(run, text, pretrained, tmp_path):
    out, untokenized = tmp_path / "out", tmp_path / "untokenized"
    load_pretrained(pretrained).save_pretrained(untokenized)
    for folder, settings, message in (
        (run, Removal(steps=0), "steps must be at least 1; got 0"),
        (run, Removal(steps=1, text="wikitext-2"), "trains on its own data; leave --text out"),
        (run, Removal(steps=1, to="rms"), "rms computes statistics at inference, too; take un"),
        (run, Removal(steps=1, to="nu"), "nu"),
        (run, Removal(steps=1, to="power(groups=1)"), "computes statistics at inference, too; take un"),
        (run, Removal(steps=1, lr=math.nan), "lr must be above 0 and finite; got nan"),
        (untokenized, Removal(steps=1, text=str(text)), "holds no tokenizer"),
        (pretrained, Removal(steps=1), "name a text to train on"),
        (pretrained, Removal(steps=1, text="nothing.txt"), "is neither a file nor a corpus"),
        (pretrained, Removal(steps=1, text=str(text), loss="task"), "--loss task needs a run"),
        (tmp_path / "none", Removal(steps=1), "there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            remove_norms(folder, out, settings)
        assert not (out / "model.safetensors").exists()


def test_a_model_without_norms_has_none_left_to_remove(run, tmp_path):
    remove_norms(run, tmp_path / "out", Removal(steps=1))
    with pytest.raises(ValueError, match="has no norms left to remove"):
        remove_norms(tmp_path / "out", tmp_path / "more", Removal(steps=1))
    assert not (tmp_path / "more").exists()


def test_another_model_in_the_folder_stays(run, tmp_path):
    (tmp_path / "unfolded").mkdir()
    with pytest.raises(ValueError, match="holds another model"):
        remove_norms(run, tmp_path, Removal(steps=1, unfolded=True))
    assert [file.name for file in tmp_path.iterdir()] == ["unfolded"]


def test_the_model_itself_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="is the model itself, which is kept"):
        remove_norms(tmp_path, tmp_path / "." / "", Removal(steps=1))
