"""Pictures into classes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.batches import Batches, batches_of
from normkit.lab.train.task import Batch, Task
from normkit.transforms import calibrate

CALIBRATION = 50


class Classification(Task):
    """A Vision Transformer with cross-entropy; accuracy."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Random pictures, `batch_tokens` of them."""
        images, labels = self.data.train
        run = self.settings

        def order(epoch: int) -> list[np.ndarray]:
            return batches_of([1] * len(labels), run.batch_tokens, bucketing=False, seed=run.seed, epoch=epoch)

        return iter(Batches(order, lambda items: _batch(images[items], labels[items]), start))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of the classes."""
        images, labels = batch.tensors
        return F.cross_entropy(self.model(images), labels, label_smoothing=smoothing)

    def validation(self) -> list[Batch]:
        """All of the validation split at once."""
        return [_batch(*self.data.valid)]

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Accuracy in percent, with running statistics and with calibrated ones."""
        tell("scoring")
        scores = {"running": self._accuracy()}
        if self.has_statistics():
            batches = [batch for batch, _ in zip(self.batches(0), range(CALIBRATION), strict=False)]
            trained = self.model
            self.model = calibrate(trained, batches, forward=lambda model, b: model(self.on_device(b).tensors[0]))
            scores["calibrated"] = self._accuracy()
            self.model = trained
        return scores

    @torch.no_grad()
    def _accuracy(self) -> dict[str, float]:
        batch = self.on_device(_batch(*self.data.test))
        self.model.eval()
        images, labels = batch.tensors
        right = (self.model(images).argmax(1) == labels).double().mean()
        return {"loss": self.mean_loss([batch]), "accuracy": 100 * float(right), "n": batch.words}


def _batch(images: Tensor, labels: Tensor) -> Batch:
    return Batch((images, labels), len(labels), len(labels))
