"""Object detection and instance segmentation: boxes and masks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normkit_papers.data.batches import batches_of, endless
from normkit_papers.data.scenes import Scenes
from normkit_papers.models.detection import DETECTORS
from normkit_papers.models.torchvision_ops import torchvision_operators
from normkit_papers.train.average_precision import average_precision, coco_results
from normkit_papers.train.finetune import start_from
from normkit_papers.train.pairs import spread
from normkit_papers.train.scenes import Item, Samples, SceneAugmentation, load_batches
from normkit_papers.train.task import Batch, Task

TEST_BATCH = 4  # images


class Detection(Task):
    """Sum of the losses of Faster or Mask R-CNN; average precision of boxes and masks."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self.detector = DETECTORS[run.model.arch]
        for scenes in (data.train, data.test):
            if self.detector.masks and not scenes.has_outlines:
                raise ValueError(
                    f"{data.name} has objects without outlines, and {run.model.arch} trains masks; use a faster_rcnn "
                    "model or add the outlines"
                )
        self.samples = self._samples(data.train, SceneAugmentation(self.detector))
        if run.weights:
            swin = model.get_submodule("backbone.body.features")
            start_from(run.weights, swin, prefix="features.")  # torchvision's names

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield random batches of `batch_tokens` images, of similar aspect ratio with bucketing."""
        return self.skip_broken(load_batches(self.samples, self._order(start, stride), self.settings.workers))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups of `Task`; Swin's tables of relative positions have no weight decay."""
        tables = [p for name, p in self.model.named_parameters() if name.endswith("relative_position_bias_table")]
        matrices, vectors = super().parameter_groups()
        kept = {id(p) for p in tables}
        matrices["params"] = [p for p in matrices["params"] if id(p) not in kept]
        vectors["params"] = [*vectors["params"], *tables]
        return [matrices, vectors]

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the sum of the losses of proposals and heads; the model is in training mode."""
        return torch.stack(list(self.losses(batch).values())).sum()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of classes, boxes and masks, and the two of the proposals."""
        return self.model(*batch.tensors)

    def validate(self) -> dict[str, float]:
        """Return losses and average precision of `valid_items` images of validation."""
        return self._score(self.data.valid, self.settings.valid_items)

    def score_test(self) -> dict[str, float]:
        """Return losses and average precision of the test split."""
        return self._score(self.data.test, self.settings.test_items)

    def describe_data(self) -> dict[str, object]:
        """Return sizes of the splits, what was left out, and the source of the operators."""
        return {
            **super().describe_data(),
            "train": self.data.train.counts,
            "test": self.data.test.counts,
            "operators": torchvision_operators(),
        }

    def forward_norms(self, model: Any, batch: Batch) -> Any:
        """Compute the feature maps of the backbone, which has all the norms."""
        images, _ = self.on_device(batch).tensors
        return model.backbone(model.transform(images)[0].tensors)

    @torch.no_grad()
    def _score(self, scenes: Scenes, many: int) -> dict[str, float]:
        """Return mean losses, average precision, and the number of images; `many` 0 uses all."""
        model: Any = self.model
        was, rows, seen = model.training, list[dict[str, Any]](), list[int]()
        totals: dict[str, float] = {}
        categories = list(scenes.categories)
        items = [Item(0, at) for at in spread(len(scenes), many or len(scenes))]
        order = [items[at : at + TEST_BATCH] for at in range(0, len(items), TEST_BATCH)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # the losses of the heads use a random sample of boxes
            batches = load_batches(self._samples(scenes, None), order, self.settings.workers)
            for each in self.skip_broken(batches, endless=False):
                batch = self.on_device(each)
                images, targets = batch.tensors
                model.train()  # it returns losses, with backbone and image sizes as at inference
                model.backbone.eval()
                model.transform.eval()
                for part, loss in self.losses(batch).items():
                    totals[part] = totals.get(part, 0.0) + float(loss) * batch.words
                model.eval()
                for target, detections in zip(targets, model(images), strict=True):
                    seen.append(target["number"])
                    rows += coco_results(seen[-1], categories, detections)
        model.train(was)
        if not seen:
            raise ValueError(f"no image of {scenes.files.path} can be read")
        means = {part: total / len(seen) for part, total in totals.items()}
        scores = average_precision(scenes.truth, rows, self.detector.masks, seen)
        return {"loss": sum(means.values()), **means, **scores, "n": len(seen)}

    def _samples(self, scenes: Scenes, augment: SceneAugmentation | None) -> Samples:
        return Samples(scenes, masks=self.detector.masks, augment=augment, seed=self.settings.seed)

    def _order(self, start: int, stride: int) -> Iterator[list[Item]]:
        """Yield the images of each batch, as `batches`."""
        run, scenes = self.settings, self.data.train.scenes
        shapes = [scene.width / scene.height for scene in scenes]

        def epoch(number: int) -> list[Any]:
            ones = [1] * len(scenes)
            lists = batches_of(ones, run.batch_tokens, bucketing=run.bucketing, by=shapes, seed=run.seed, epoch=number)
            return [[Item(number, at) for at in each.tolist()] for each in lists]

        return endless(epoch, list, start, stride)
