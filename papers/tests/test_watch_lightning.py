"""The callback: rows of any LightningModule, to a file and to the loggers of its trainer."""

import csv

import pytest
import torch

from normkit_papers.train.lightning import lightning  # isort: skip
from normkit.watch.lightning import LOGGED, Watch  # isort: skip
from torch import nn

from normkit import watch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on loaders


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def training_step(self, batch, index):
        return self.norm(self.line(batch)).pow(3).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def fit(callback, steps, folder, logger, resume=None, module=Module, batches=(BATCH,) * 10, **options):
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[callback], logger=logger, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, log_every_n_steps=1, default_root_dir=folder, accelerator="cpu", **options,
    )  # fmt: skip
    trainer.fit(module(), data, ckpt_path=resume, weights_only=None if resume is None else True)
    return trainer


def named(rows):
    """Expected values of loggers, by name and global step."""
    found = {}
    for row in rows:
        if row.quantity in LOGGED:
            found.setdefault(f"{row.quantity}/{row.site}".rstrip("/"), {})[row.step - 1] = row.value
    assert set(found) == {*(f"{name}/norm" for name in LOGGED if name != "gradient_norm"), "gradient_norm"}
    return found


def test_a_file_and_a_logger(tmp_path):
    options = {"every": 2, "to": tmp_path / "rows.csv", "log_every": 4}
    whole = Watch(**options)
    fit(whole, 10, tmp_path, lightning.loggers.CSVLogger(tmp_path, name="log"))
    expected = watch.read(tmp_path)
    assert {row.step for row in expected} == {1, 3, 5, 7, 9}
    assert [row[:4] for row in whole.rows] == [row[:4] for row in expected]
    assert {row.site for row in expected} == {"norm", ""}
    with next((tmp_path / "log").rglob("metrics.csv")).open() as file:
        logged = list(csv.DictReader(file))
    for name, points in named(whole.rows).items():
        assert {int(row["step"]): float(row[name]) for row in logged if row.get(name)} == pytest.approx(points)

    (tmp_path / "rows.csv").unlink()
    fit(Watch(**options), 6, tmp_path, False).save_checkpoint(tmp_path / "last.ckpt")
    fit(Watch(**options), 10, tmp_path, False, tmp_path / "last.ckpt")
    assert watch.read(tmp_path) == expected, "as if it had not been interrupted"


def test_padding_is_found_in_a_batch_with_names(tmp_path):
    class Named(Module):
        def training_step(self, batch, index):
            return super().training_step(batch["x"], index)

    watching = Watch(every=1, quantities=["tokens"])
    batch = {"x": torch.randn(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    fit(watching, 2, tmp_path, False, module=Named, batches=(batch, batch))
    assert [row.value for row in watching.rows] == [3, 3]


def test_wrong_arguments_keep_the_rows_of_an_earlier_run(tmp_path):
    path = tmp_path / "rows.csv"
    fit(Watch(every=1, to=path, quantities=["rms"]), 3, tmp_path, False)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="rmss"):
        fit(Watch(every=1, to=path, quantities=["rmss"]), 3, tmp_path, False)
    assert path.read_bytes() == before
    (tmp_path / "rows.txt").write_bytes(b"kept")
    with pytest.raises(ValueError, match="to must be"):
        fit(Watch(every=1, to=tmp_path / "rows.txt"), 3, tmp_path, False)
    assert (tmp_path / "rows.txt").read_bytes() == b"kept"


def test_the_loss_of_each_step_is_recorded(tmp_path):
    callback = Watch(every=2, quantities=["loss"])
    fit(callback, 4, tmp_path, False, accumulate_grad_batches=2)
    assert [row.step for row in callback.rows] == [1, 3, 5, 7]
    losses = [row.value for row in callback.rows]
    with torch.no_grad():
        assert losses[0] == pytest.approx(float(Module().training_step(BATCH, 0)), rel=1e-5)
    assert len(losses) == 4


def test_a_named_module_gives_the_loss_and_that_of_a_constant(tmp_path, monkeypatch):
    monkeypatch.setattr(Module, "criterion", nn.MSELoss(), raising=False)
    monkeypatch.setattr(Module, "training_step", lambda self, x, _: self.criterion(self.norm(self.line(x)), x) * 2)
    callback = Watch(every=1, quantities=["loss", "constant_loss"], loss="criterion")
    fit(callback, 2, tmp_path, False)
    losses, constants = ([row.value for row in callback.rows if row.quantity == name] for name in callback.quantities)
    with torch.no_grad():
        assert losses[0] == pytest.approx(float(Module().training_step(BATCH, 0)) / 2, rel=1e-5)
    assert constants == pytest.approx([float(BATCH.var(0, correction=0).mean())] * 2)
