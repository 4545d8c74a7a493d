"""What every kind of training has in common: the optimizer, the schedule, and the questions a run asks."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.lab.train.config import Run
from normkit.lab.train.lit import lightning
from normkit.lab.train.parallel import gathered, shard
from normkit.lab.train.schedules import Constant, InverseSqrt, ValidationDecay, cosine, steps_down
from normkit.norms import StatNorm


class Batch(NamedTuple):
    """Tensors of a batch, and how much it holds."""

    tensors: tuple[Any, ...]  # of a detector, lists of pictures and of targets
    words: int  # what speed is told in: words or pictures
    tokens: int  # what the loss is a mean over


class Task(lightning.LightningModule):
    """A model, its data, its loss and its scores. A task says `batches`, `loss`, `validation`, `score`."""

    def __init__(self, run: Run, model: nn.Module, data: Any):
        super().__init__()
        self.settings, self.model, self.data = run, model, data
        self.outputs: dict[str, list[str]] = {}  # lines made of the test split, by kind of score
        self.broken: set[str] = set()  # pictures that could not be read, and why
        self.start = 0  # batches that each process has seen

    def batches(self, start: int) -> Iterator[Batch]:
        """Training batches without end, from the `start`-th on: a function of the run's seed and nothing else."""
        raise NotImplementedError

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Mean loss of a batch."""
        raise NotImplementedError

    def validation(self) -> list[Batch]:
        """Batches to validate on."""
        raise NotImplementedError

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Scores on the test split by kind of statistics; `tell` hears what is being done. The model is not changed."""
        raise NotImplementedError

    def train_dataloader(self) -> Iterator[Batch]:
        """The batches of this process: of several, each takes its turn."""
        ranks = self.trainer.world_size
        return itertools.islice(self.batches(self.start * ranks + self.trainer.global_rank), 0, None, ranks)

    def configure_model(self) -> None:
        """Cut the model into the parts that each process holds, where the run says so."""
        if self.settings.strategy == "fsdp2" and self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss to minimize, and the same to look at."""
        loss = self.loss(batch, self.settings.label_smoothing)
        return {"loss": loss, "seen": loss.detach()}

    def configure_optimizers(self) -> Any:
        """The optimizer, and the learning rate of each step."""
        run = self.settings
        fused = run.precision != "16-mixed"  # there Lightning clips, which a fused optimizer would have to do itself
        if run.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.groups(), lr=run.lr, momentum=run.momentum, fused=fused)
        else:
            optimizer = torch.optim.AdamW(self.groups(), lr=run.lr, betas=run.betas, eps=run.eps, fused=fused)
        warmup = min(run.warmup, run.steps - 1)
        if run.schedule == "cosine":
            schedule = cosine(optimizer, warmup, run.steps, run.floor_lr, run.warmup_start)
        elif run.schedule == "steps":
            schedule = steps_down(optimizer, warmup, run.milestones, run.decay, run.warmup_start)
        elif run.schedule == "inverse_sqrt":
            schedule = InverseSqrt(optimizer, run.warmup, run.warmup_start)
        elif run.schedule == "constant":
            schedule = Constant(optimizer, run.warmup)
        else:
            schedule = ValidationDecay(optimizer, run.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def groups(self) -> list[dict[str, Any]]:
        """What the optimizer moves: matrices, whose weights decay, and vectors; every parameter, once."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        decay = self.settings.weight_decay
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """As Lightning does; it refuses a fused optimizer in bf16 too, where there is nothing to unscale."""
        if self.settings.precision == "bf16-mixed":
            if gradient_clip_val:
                nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A resumed run knows what could not be read before."""
        self.on_train_end()
        checkpoint["broken"] = sorted(self.broken)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What `on_save_checkpoint` gave."""
        self.broken.update(checkpoint.get("broken", ()))

    def on_train_end(self) -> None:
        """Tell each other what could not be read."""
        self.broken = set().union(*gathered(self.broken))

    def read(self, found: Iterable[tuple[Batch, list[str]]], endless: bool = True) -> Iterator[Batch]:
        """Batches that come with what could not be read for them: it is noted, or where the run says so an error.

        A batch of which nothing is left is skipped, or where batches have no end, and so might never come, an error.
        """
        for batch, broken in found:
            if broken and self.settings.broken == "refuse":
                raise ValueError(f"{broken[0]}; mend or remove it, or --broken skip")
            self.broken.update(broken)
            if batch.words:
                yield batch
            elif endless:
                raise ValueError(f"none of a batch's pictures can be read; the first: {broken[0]}")

    def broken_facts(self) -> dict[str, object]:
        """How many pictures could not be read, and the first of them; nothing where all could."""
        return {"broken": {"count": len(self.broken), "first": sorted(self.broken)[:5]}} if self.broken else {}

    def settle(self) -> None:
        """What becomes of the model when training has ended, before it is saved and scored: nothing."""

    def look(self) -> dict[str, float]:
        """What is noted of the validation split."""
        return {"loss": self.validate()}

    def facts(self) -> dict[str, object]:
        """What the run was trained on."""
        return {"name": self.data.name}

    def validate(self) -> float:
        """Mean loss of the validation split, at inference."""
        return self.mean_loss(self.validation())

    def on_device(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return Batch(tuple(tensor.to(self.device) for tensor in batch.tensors), batch.words, batch.tokens)

    @torch.no_grad()
    def mean_loss(self, batches: list[Batch], smoothing: float = 0.0) -> float:
        """Mean loss of batches, without dropout."""
        was = self.model.training
        self.model.eval()
        total = sum(float(self.loss(self.on_device(batch), smoothing)) * batch.tokens for batch in batches)
        self.model.train(was)
        return total / sum(batch.tokens for batch in batches)

    def has_statistics(self) -> bool:
        """Whether some norm computes with statistics of batches."""
        return any(isinstance(module, StatNorm) for module in self.model.modules())
