"""Image classification, from scratch or by fine-tuning; the digits of scikit-learn.

torchvision crops, flips, erases and mixes; timm has the RandAugment that Vision Transformers are trained with. All of
them draw from global generators, so these are seeded for each batch and restored afterwards. A batch depends on the
run's seed and its number only, whichever process makes it.
"""

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from normkit_papers.data.batches import Batch, batches_of, endless, load
from normkit_papers.data.images import ImageData, ImageSplit, decode, image_batches
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.train.config import ImageRun, Images
from normkit_papers.train.lightning import WeightAveraging, lightning
from normkit_papers.train.task import Task, decay_groups
from normkit_papers.train.weights import start_from

TEST_BATCH = 256  # images
SHARP = 4  # times the model's size: a smaller image would be visible in the smallest crop, 8 % of its area
FILL = 0.45  # of the image's size: the longest translation of RandAugment, as in timm
Request = tuple[int, Sequence[int]]  # the number of a batch and its images


class Classification(Task):
    """Digits, which fit into memory: cross-entropy of the classes; accuracy in percent."""

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
        return self.cross_entropy(self.model(images), labels, smoothing)

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


class ImageClassification(Task):
    """Cross-entropy of classes or of mixed labels; accuracy.

    If the run keeps a moving average of the weights, that is scored and saved.
    """

    data: ImageData
    settings: ImageRun

    def __init__(self, run: ImageRun, model: nn.Module, data: ImageData):
        super().__init__(run, model, data)
        self.augmentation = ImageAugmentation(run.images, data, run.model.image_size)
        self.classes = len(data.vocabularies["classes"].plain())
        self.initialized: list[str] = []
        if run.images.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[reportCallIssue]

    def load_pretrained(self) -> None:
        """Load the weights from which fine-tuning starts."""
        run = self.settings
        if run.weights:
            self.initialized = start_from(run.weights, self.model, self.model.get_submodule("head"))
        elif run.body_lr != 1:
            raise ValueError(f"body_lr={run.body_lr:g} needs weights to start from; give --weights FILE")

    def callbacks(self) -> list[lightning.Callback]:
        """Return the moving average of the weights, if the run keeps one."""
        return [moving_average(self.settings.ema)] if self.settings.ema else []

    # -- training -----------------------------------------------------------------------------------------------------

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield random batches of `batch_tokens` images."""
        run, split = self.settings, self.data.train

        def epoch(number: int) -> list[Any]:
            return image_batches(split, run.batch_tokens, seed=run.seed, epoch=number)

        order = zip(itertools.count(start, stride), endless(epoch, list, start, stride), strict=False)
        return self._load(split, order, run.seed)

    def _load(self, split: ImageSplit, order: Iterable[Request], seed: int | None) -> Iterator[Batch]:
        """Yield batches in an order."""
        made = ImageBatches(split, self.augmentation, seed)
        how = {"batch_size": None, "sampler": order, "pin_memory": self.device.type == "cuda"}
        for images, labels in load(made, self.settings.workers, **how):
            yield Batch((images, labels), len(labels), len(labels))

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of the classes, or of their mixtures."""
        images, labels = batch.tensors
        return self.cross_entropy(self._logits(self.model, images), labels, smoothing)

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        if self.settings.images.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model(images)

    def forward_norms(self, model: Any, batch: Batch) -> Tensor:
        """Compute the logits."""
        return self._logits(model, self.on_device(batch).tensors[0])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return matrices and vectors, of the head with `lr` and of the rest with `body_lr * lr`.

        The final norm is included in fine-tuning too: Unified Normalization's script leaves it out.
        """
        run = self.settings
        if run.body_lr == 1:
            return super().parameter_groups()
        head = list(self.model.get_submodule("head").parameters())
        of_head = {id(parameter) for parameter in head}
        body = [parameter for parameter in self.model.parameters() if id(parameter) not in of_head]
        parts = ((head, run.lr), (body, run.body_lr * run.lr))
        return [{**group, "lr": lr} for part, lr in parts for group in decay_groups(part, run.weight_decay)]

    # -- scores -------------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Return loss and accuracy of the validation split."""
        found = self._score(self.data.valid)
        return {name: found[name] for name in ("loss", "accuracy")}

    def score_test(self) -> dict[str, float]:
        """Return loss and accuracy of the test split."""
        return self._score(self.data.test)

    @torch.no_grad()
    def _score(self, split: ImageSplit) -> dict[str, float]:
        """Return the mean loss, and the accuracy in percent with its sampling error."""
        model, count = self.model, len(split.labels)
        was = model.training
        model.eval()
        order = [(0, range(at, min(at + TEST_BATCH, count))) for at in range(0, count, TEST_BATCH)]
        total, seen, right = 0.0, 0, 0
        for batch in self._load(split, order, None):
            images, labels = self.on_device(batch).tensors
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16-mixed"):
                logits = self._logits(model, images).float()
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
            seen += len(labels)
            right += int((logits.argmax(1) == labels).sum())
        model.train(was)
        share = right / seen
        error = 100 * (share * (1 - share) / seen) ** 0.5
        return {"loss": total / seen, "accuracy": 100 * share, "n": seen, "accuracy_error": error}

    def test_images(self, count: int, size: int) -> Iterator[Tensor]:
        """Yield the first `count` test images in batches of `size`."""
        ends = range(size, min(count, len(self.data.test.labels)) + 1, size)
        for batch in self._load(self.data.test, [(0, range(end - size, end)) for end in ends], None):
            yield self.on_device(batch).tensors[0]

    def describe_data(self) -> dict[str, object]:
        """Return sizes of the splits and the origin of the weights."""
        facts = super().describe_data()
        facts["splits"] = {name: len(getattr(self.data, name).labels) for name in ("train", "valid", "test")}
        facts["classes"] = self.classes
        if self.settings.weights:
            facts["weights"] = {"from": self.settings.weights, "initialized": self.initialized}
        return facts


def moving_average(decay: float) -> WeightAveraging:
    """Return Lightning's moving average of the weights, with buffers.

    Floating-point buffers (statistics, PyTorch's `running_mean`) are averaged too: averages describe the features of
    averaged weights better than the last step's do. Integers, such as steps, are copied; Lightning's own
    EMAWeightAveraging averages and truncates them.
    """

    def update(averaged: list[Tensor], new: list[Tensor], count: Tensor | int) -> None:
        for old, value in zip(averaged, new, strict=True):
            if old.is_floating_point():
                old.lerp_(value, 1 - decay)
            else:
                old.copy_(value)

    return WeightAveraging(multi_avg_fn=update)


class ImageBatches(Dataset):
    """Batches of images and labels, chosen by the number of a batch and those of its images.

    The process that asks for a batch makes it.
    """

    def __init__(self, split: ImageSplit, augmentation: "ImageAugmentation", seed: int | None):
        self.split, self.augmentation, self.seed = split, augmentation, seed  # no seed: as at inference

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        number, items = request
        images = [decode(self.split, item, self.augmentation.least) for item in items]
        labels = torch.from_numpy(self.split.labels[list(items)])
        if self.seed is None:
            return self.augmentation.test(images, labels)
        return self.augmentation.train(images, labels, self.seed * 1_000_003 + number)


class ImageAugmentation:
    """Makes tensors `[batch, 3, size, size]` of images, and labels or label mixtures."""

    def __init__(self, settings: Images, data: ImageData, size: int):
        load_torchvision()
        from torchvision.transforms import v2

        classes = len(data.vocabularies["classes"].plain())
        self.least = SHARP * size  # pixels per side at which large images are decoded, at least
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
        self.train_view = v2.Compose(_training(settings, size, data.mean))
        noise: Any = "random"  # the annotation allows numbers only
        self.erase = v2.RandomErasing(settings.erase, value=noise) if settings.erase else None
        bicubic = v2.InterpolationMode.BICUBIC
        whole = [v2.Resize(round(size / settings.test_crop), bicubic), v2.CenterCrop(size), v2.PILToTensor()]
        self.test_view = v2.Compose(whole)
        kinds = [(settings.mixup, v2.MixUp), (settings.cutmix, v2.CutMix)]
        mixes = [kind(alpha=alpha, num_classes=classes) for alpha, kind in kinds if alpha]
        self.mix = v2.RandomChoice(mixes) if mixes else None

    def train(self, images: Sequence[Any], labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Augment a training batch; the same seed gives the same batch."""
        with seeded(seed):
            batch = self._normalize([self.train_view(image) for image in images])
            if self.erase is not None:
                batch = torch.stack([self.erase(image) for image in batch])
            return (batch, labels) if self.mix is None else self.mix(batch, labels)

    def test(self, images: Sequence[Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Crop the centre of each image."""
        return self._normalize([self.test_view(image) for image in images]), labels

    def _normalize(self, images: list[Tensor]) -> Tensor:
        return torch.stack(images).float().div_(255).sub_(self.mean).div_(self.std)


def _training(settings: Images, size: int, mean: tuple[float, float, float]) -> list[Any]:
    """Return transforms of a PIL image to uint8 `[3, size, size]`."""
    from torchvision.transforms import v2

    bicubic = v2.InterpolationMode.BICUBIC
    if settings.crop == "area":
        steps: list[Any] = [v2.RandomResizedCrop(size, interpolation=bicubic)]
    else:
        steps = [v2.Resize(size, bicubic), v2.RandomCrop(size, padding=settings.padding)]
    steps.append(v2.RandomHorizontalFlip())
    if settings.rand_augment:
        steps.append(_rand_augment(settings.rand_augment, size, mean))
    return [*steps, v2.PILToTensor()]


def _rand_augment(name: str, size: int, mean: tuple[float, float, float]) -> Any:
    """Return timm's RandAugment of a name."""
    from timm.data import auto_augment

    posterize = auto_augment.posterize
    # timm keeps 0 bits at magnitude 9, which Pillow 13 refuses and earlier ones turned to black
    black = {
        "PosterizeIncreasing": lambda image, bits, **_: posterize(image, bits) if bits else image.point(lambda _: 0)
    }
    auto_augment.NAME_TO_OP.update(black)
    color = tuple(round(255 * value) for value in mean)
    try:
        return auto_augment.rand_augment_transform(name, {"translate_const": int(size * FILL), "img_mean": color})
    except (AssertionError, ValueError):  # timm's have no name of the setting
        example = "a name of timm, such as rand-m9-mstd0.5-inc1"
        raise ValueError(f"images.rand_augment must be {example}; got {name!r}") from None


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of PyTorch (CPU), NumPy and Python inside the block alone.

    >>> with seeded(1):
    ...     first = torch.rand(())
    >>> with seeded(1):
    ...     print(bool(torch.rand(()) == first))
    True
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:  # Lightning's isolate_rng restores nothing after an exception, such as Ctrl-C
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
