"""Train any model on any loss for some steps, with checkpoints to resume from."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from normkit.norms import Norm
from normkit_papers.train.lightning import lightning, make_trainer, run_trainer
from normkit_papers.train.progress import Progress
from normkit_papers.train.task import decay_groups
from normkit_papers.train.weights import check_fit, model_state, read_checkpoint

CLIP = 1.0  # largest norm of a gradient
BETAS = (0.9, 0.98)  # momentums of AdamW
WEIGHT_DECAY = 0.01  # of matrices


def fit(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int], Iterator[Any]],
    *,
    steps: int,
    lr: float,
    dropout: bool = False,
    frozen: bool = True,
    checkpoint: Path | None = None,
    carried: tuple[Callable[[], Any], Callable[[Any], object]] = (list, list),
    every: int = 100,
    on_progress: Callable[[Progress], object] | None = None,
) -> None:
    """Train a model in place, on the CPU.

    AdamW, a short warm-up, then a cosine to zero; gradients are clipped. A checkpoint that exists is resumed.

    Args:
        model: The model; it is in evaluation mode afterwards.
        loss: Called as `loss(model, batch)`.
        batches: Returns the batches from a given number on, which depend on nothing else.
        steps: Number of steps.
        lr: Highest learning rate.
        dropout: Train with the model's dropout.
        frozen: Keep the statistics of norms: they train as they will be at inference, and cannot drift.
        checkpoint: File to write every `every` steps and on interrupt; removed by the caller.
        carried: Two functions for checkpoints, which return and restore what models carry from batch to batch.
        every: Steps between checkpoints.
        on_progress: Called at each step; if it returns True, training stops after writing the checkpoint.

    Raises:
        ValueError: If the loss is not finite, or the checkpoint is of another model.
        KeyboardInterrupt: If `on_progress` stopped it.
    """
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, Norm):
            module.train(not frozen)

    class Fit(lightning.LightningModule):
        """The model with its loss, batches, optimizer and checkpoints."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.start = model, 0

        def train_dataloader(self) -> Iterator[Any]:
            return batches(self.start)

        def configure_optimizers(self) -> Any:
            groups = decay_groups((p for p in model.parameters() if p.requires_grad), WEIGHT_DECAY)
            optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
            warmup = min(100, steps // 10 + 1)
            schedule = LambdaLR(optimizer, lambda n: min(1, (n + 1) / warmup) * (1 + math.cos(math.pi * n / steps)) / 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.manual_seed(self.global_step)  # for dropout, so that a resumed run is the same
            value = loss(model, batch)
            if not value.isfinite():
                step = self.global_step + 1
                raise ValueError(f"the loss is {float(value.detach())} at step {step}; lower lr={lr:g}")
            return value

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            step = self.global_step
            stopped = on_progress and on_progress(Progress("training", step, steps, float(outputs["loss"])))
            if checkpoint is not None and (stopped or step % every == 0) and step < steps:
                self.trainer.save_checkpoint(checkpoint)
            if stopped:
                raise KeyboardInterrupt

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["carried"] = carried[0]()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            carried[1](checkpoint["carried"])

    task = Fit()
    resumed = checkpoint if checkpoint is not None and checkpoint.exists() else None
    if resumed is not None:
        saved = read_checkpoint(resumed)
        check_fit(model_state(saved), model.state_dict(), resumed)
        task.start = saved["global_step"]
    folder = None if checkpoint is None else checkpoint.parent
    run_trainer(make_trainer(folder, max_steps=steps, accelerator="cpu", gradient_clip_val=CLIP), task, resumed)
    model.eval()
