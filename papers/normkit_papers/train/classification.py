"""Classification of small images that fit into memory: the digits of scikit-learn."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normkit_papers.data.batches import batches_of, endless
from normkit_papers.train.task import Batch, Task


class Classification(Task):
    """Cross-entropy of the classes; accuracy in percent."""

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield random batches of `batch_tokens` images."""
        images, labels = self.data.train
        run = self.settings

        def order(epoch: int) -> list[np.ndarray]:
            return batches_of([1] * len(labels), run.batch_tokens, bucketing=False, seed=run.seed, epoch=epoch)

        return endless(order, lambda items: _batch(images[items], labels[items]), start, stride)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch.tensors
        return F.cross_entropy(self.model(images), labels, label_smoothing=smoothing)

    def validation_batches(self) -> list[Batch]:
        """Return the validation split as one batch."""
        return [_batch(*self.data.valid)]

    @torch.no_grad()
    def score_test(self) -> dict[str, float]:
        """Return loss and accuracy."""
        batch = self.on_device(_batch(*self.data.test))
        self.model.eval()
        images, labels = batch.tensors
        right = (self.model(images).argmax(1) == labels).double().mean()
        return {"loss": self.mean_loss([batch]), "accuracy": 100 * float(right), "n": batch.words}


def _batch(images: Tensor, labels: Tensor) -> Batch:
    return Batch((images, labels), len(labels), len(labels))
