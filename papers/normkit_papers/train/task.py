"""Base class of the tasks: optimizer, schedule, batches, validation and scores."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normkit.models import calibrate, scale_loss
from normkit.norms import StatNorm
from normkit_papers.data.batches import Batch
from normkit_papers.train.lightning import lightning
from normkit_papers.train.muon import MuonWithAdamW
from normkit_papers.train.schedules import Schedule


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: matrices, with weight decay, and vectors, without."""
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


class Task(lightning.LightningModule):
    """A model, its data, its loss and its scores.

    A task defines `batches`, `loss`, `validation_batches` and `score_test`.
    """

    calibration_batches: int = 50

    def __init__(self, run: Any, model: nn.Module, data: Any):
        super().__init__()
        if run.uses_validation and data.valid is data.test:
            raise ValueError(
                f"patience, average_of=best and schedule=validation_decay choose by the validation split, and "
                f"{data.name} validates on its test split. Leave them out, or split off a validation set (for classes "
                "of images: images.held_out)"
            )
        self.settings, self.model, self.data = run, model, data
        self.criterion: nn.CrossEntropyLoss | None = nn.CrossEntropyLoss()  # None: the model computes its loss
        self.kind = "running"  # of the scores that are being computed
        self.calibration_batches = min(self.calibration_batches, run.steps)  # a short try is not to wait for more
        self.outputs: dict[str, list[str]] = {}  # decoded test split, by kind of scores
        self.start = 0  # batches that each process has trained on
        self.hooks = contextlib.ExitStack()  # of the scale loss, and batches with their workers, while it trains

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "data": None, "hooks": None}  # Lightning copies a task to average its weights

    def load_pretrained(self) -> None:
        """Load the weights from which fine-tuning starts."""

    def callbacks(self) -> list[lightning.Callback]:
        """Return callbacks that this task needs for training."""
        return []

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield training batch number `start`, `start + stride`, ..., by the run's seed only."""
        raise NotImplementedError

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def cross_entropy(self, scores: Tensor, target: Tensor, smoothing: float, ignored: int = -100) -> Tensor:
        """Return the mean cross-entropy, by a module, as its hook shows `Watch` what the targets are."""
        assert self.criterion is not None
        self.criterion.label_smoothing, self.criterion.ignore_index = smoothing, ignored
        return self.criterion(scores, target)

    def validation_batches(self) -> list[Batch]:
        """Return the batches of the validation split."""
        raise NotImplementedError

    def score_test(self) -> dict[str, float]:
        """Return scores on the test split with the model's current statistics."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Iterator[Batch]:
        """Yield the batches of this process; several processes take turns."""
        ranks = self.trainer.world_size
        found: Any = self.batches(self.start * ranks + self.trainer.global_rank, ranks)
        return self.hooks.enter_context(contextlib.closing(found))

    def on_train_start(self) -> None:
        """Put the hooks of the scale loss on the norms."""
        if self.settings.scale_loss:
            self.scales = self.hooks.enter_context(scale_loss(self.model))

    def on_train_end(self) -> None:
        """Remove the hooks, and end the workers."""
        self.hooks.close()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss to minimize, and a detached copy to record."""
        run = self.settings
        loss = self.loss(batch, run.label_smoothing)
        scaled = loss + run.scale_loss * self.scales() if run.scale_loss else loss
        return {"loss": scaled, "recorded": loss.detach()}

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule by step."""
        run, groups = self.settings, self.parameter_groups()
        if run.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=run.lr, momentum=run.momentum, fused=True)
        elif run.optimizer == "muon":
            optimizer = MuonWithAdamW(self.model, run.lr, run.momentum, run.betas, run.weight_decay)
        else:
            optimizer = torch.optim.AdamW(groups, lr=run.lr, betas=run.betas, fused=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Schedule(optimizer, run), "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters in groups for the optimizer."""
        return decay_groups(self.model.parameters(), self.settings.weight_decay)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip as Lightning does, also with a fused optimizer in bf16."""
        if self.settings.precision == "bf16-mixed":
            if gradient_clip_val:
                nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def describe_data(self) -> dict[str, object]:
        """Return what the result file has about the data."""
        return {"name": self.data.name}

    # -- validation and scores ----------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Return what is recorded of the validation split; `loss` at least."""
        return {"loss": self.mean_loss(self.validation_batches())}

    def score(self, on_stage: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Score the test split with statistics "running" and, for norms with batch statistics, "calibrated".

        The model is unchanged afterwards.
        """
        on_stage("scoring")
        self.kind = "running"
        scores = {self.kind: self.score_test()}
        if self.has_statistics():
            on_stage("scoring with calibrated statistics")
            self.kind = "calibrated"
            with self.calibrated(itertools.islice(self.batches(0), self.calibration_batches)):
                scores[self.kind] = self.score_test()
        return scores

    @contextlib.contextmanager
    def calibrated(self, batches: Iterable[Batch]) -> Iterator[None]:
        """Use, inside the block, a copy of the model with the statistics of these batches."""
        trained = self.model
        self.model = calibrate(trained, batches, forward=self.forward_norms)
        try:
            yield
        finally:
            self.model = trained

    def forward_norms(self, model: Any, batch: Batch) -> Any:
        """Compute what the norms of a model take part in, for calibration."""
        return model(self.on_device(batch).tensors[0])

    def on_device(self, batch: Batch) -> Batch:
        """Move a batch to the device of the model."""
        return self.transfer_batch_to_device(batch, self.device, 0)

    @torch.no_grad()
    def mean_loss(self, batches: list[Batch], smoothing: float = 0.0) -> float:
        """Return the mean loss of batches, at inference."""
        was = self.model.training
        self.model.eval()
        total = sum(float(self.loss(self.on_device(batch), smoothing)) * batch.tokens for batch in batches)
        self.model.train(was)
        return total / sum(batch.tokens for batch in batches)

    def has_statistics(self) -> bool:
        """Return True if the model has a norm with batch statistics."""
        return any(isinstance(module, StatNorm) for module in self.model.modules())
