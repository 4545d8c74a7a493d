"""Settings of a training run: one class a task.

Each setting has one flat name everywhere: `run.lr` in code, `--lr` on the command line, `"lr"` in `run.json` and in
studies. A task has no settings that it does not use.
"""

import dataclasses
import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from normkit._util import require
from normkit.norms import parse
from normkit.watch.quantities import choose
from normkit_papers.fields import CHECKED, Below1, Count, Fraction, Natural, NotNegative, Positive, explain
from normkit_papers.models.config import Model

OF_SOME_TASKS = (
    "arch", "image_size", "patch", "fixnorm", "tie", "share", "word_dropout", "mask_logits", "decoder_depth", "memory",
    "test_memory", "experts", "last_hidden", "weight_drop", "adaptive",
)  # fmt: skip
"""Settings of the model that only the tasks use which list them in `uses`."""
_WORDS = ("fixnorm", "tie", "word_dropout", "decoder_depth")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Images:
    """Augmentation of training images, and the view of an image at inference."""

    crop: Literal["pad", "area"] = "pad"
    """Training: a window of the image padded by `padding` black pixels, or a resized window of 8 to 100 % of its area
    (Inception)."""
    padding: Natural = 4
    """Padding on each side, in pixels at the size of the model's input."""
    rand_augment: str = ""
    """RandAugment by timm's name, e.g. rand-m9-mstd0.5-inc1; empty for none."""
    erase: Fraction = 0.0
    """Probability that noise replaces a rectangle (random erasing)."""
    mixup: NotNegative = 0.0
    """Alpha of mixup: pairs of images and labels are blended by a Beta(alpha, alpha) weight; 0 for none."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix: a rectangle is taken from the other image; 0 for none."""
    test_crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Inference: side of the centre crop, as a fraction of the shorter side."""
    held_out: Natural = 0
    """Training images held out for validation; 0 validates on the test split, as papers do."""
    channels_last: bool = False
    """Memory format of images and kernels, faster for convolutions on GPUs."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Run:
    """Settings of every task, each of which has a class of its own, such as `LanguageRun`."""

    uses: ClassVar[tuple[str, ...]] = ()
    """Those of `OF_SOME_TASKS` that the task's models use."""
    one_shape: ClassVar[bool] = True
    """All training batches have the same shape."""

    name: str
    """Name of the run; its folder is runs/NAME by default."""
    task: str
    """Task: g2p, mt, lm, digits, images or detection."""
    data: str
    """Name of a data set (cmudict, multi30k.de-en, ptb, cifar10, coco, ...), or a folder of text files or images."""
    model: Model = Field(default_factory=Model)
    """The model and its norms."""
    steps: Count
    """Optimizer steps."""
    batch_tokens: Count = 500
    """Batch size: tokens (of source and target, if there are two), or images."""
    accumulate: Count = 1
    """Batches per optimizer step."""
    # optimizer and loss
    lr: Positive = 3e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum, or Muon for the matrices of the blocks with AdamW for all others."""
    momentum: Below1 = 0.9
    """Momentum of SGD and Muon."""
    betas: tuple[Below1, Below1] = (0.9, 0.98)
    """Betas of AdamW."""
    weight_decay: NotNegative = 0.0
    """Weight decay of matrices; norms, biases and other vectors have none."""
    clip: NotNegative = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    label_smoothing: Below1 = 0.1
    """Label smoothing."""
    scale_loss: NotNegative = 0.0
    """Weight of `normkit.scale_loss`, which draws the sizes of tokens together; 0 for none."""
    # learning rate over time
    schedule: Literal["cosine", "inverse_sqrt", "constant", "validation_decay", "steps"] = "cosine"
    """Learning rate after the warm-up."""
    floor_lr: NotNegative = 0.0
    """Final learning rate of schedule=cosine."""
    milestones: tuple[Count, ...] = ()
    """Steps after which schedule=steps divides the learning rate by 10."""
    warmup: Natural = 0
    """Steps of linear warm-up; of a shorter run all but the last."""
    warmup_start: NotNegative = 0.0
    """Initial learning rate of the warm-up, for inverse_sqrt, cosine and steps (fairseq's warmup-init-lr)."""
    stop_lr: NotNegative = 0.0
    """Stop when the learning rate falls below this after the warm-up."""
    patience: Natural = 0
    """Stop after this many validations without improvement; 0 never stops early."""
    # arithmetic and devices
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Precision, by Lightning's name."""
    compile: bool = False
    """Compile the model's forward and backward with torch.compile."""
    devices: Count = 1
    """GPUs, or CPU processes; each trains on batches of `batch_tokens`."""
    seed: Annotated[int, Field(ge=-(2**43), le=2**43)] = 0
    """Seed of weights, dropout and data order; the order of an epoch has the seed `1_000_003 * seed + epoch`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto uses a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; None uses PyTorch's default."""
    # validation, records, checkpoints
    valid_every: Natural = 0
    """Steps between validations; 0 validates once, at the end."""
    record_every: Natural = 25
    """Steps between records of the norms' statistics; 0 for no records."""
    quantities: tuple[str, ...] = ("default",)
    """Recorded quantities, names of normkit.watch.QUANTITIES; all includes those that are expensive."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints to resume from; 0 for none."""
    keep: Count = 5
    """Checkpoints kept."""
    average: Natural = 0
    """Average the weights of up to this many checkpoints at the end; without any checkpoint, use the last weights."""
    average_of: Literal["last", "best"] = "last"
    """Checkpoints to average: the last ones, or the best of the validations."""

    def __post_init__(self):
        inside = ".." not in self.name.split("/") and not self.name.startswith("/")
        require(inside, "name", self.name, "a relative path without .., as it is part of a folder's path")
        choose(self.quantities)
        default = Model()
        for name in set(OF_SOME_TASKS) - set(self.uses):
            given = getattr(self.model, name)
            require(given == getattr(default, name), f"model.{name}", given, f"left out for task {self.task}")
        self._check_schedule()
        self._check_devices()

    def _check_schedule(self) -> None:
        """Check schedule, validation and checkpoints against each other."""
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        require(rising, "milestones", self.milestones, "steps, each later than the one before")
        first = min(self.warmup, self.steps - 1)
        late = self.schedule != "steps" or not self.milestones or self.milestones[0] > first
        require(late, "milestones", self.milestones, f"after the warm-up of {first}")
        warm = self.schedule != "inverse_sqrt" or self.warmup > 0
        require(warm, "warmup", self.warmup, "at least 1 for schedule=inverse_sqrt")
        require(self.warmup_start <= self.lr, "warmup_start", self.warmup_start, f"at most lr={self.lr:g}")
        peak = self.lr * getattr(self, "body_lr", 1.0)
        falls = self.schedule != "cosine" or self.floor_lr <= peak
        require(falls, "floor_lr", self.floor_lr, f"at most lr * body_lr = {peak:g}")
        allowed = "above 0 for patience, average_of=best and schedule=validation_decay"
        require(self.valid_every > 0 or not self.uses_validation, "valid_every", self.valid_every, allowed)
        require(self.average <= self.keep, "average", self.average, f"at most keep={self.keep}")
        require(not self.average or self.checkpoint_every > 0, "average", self.average, "0 without checkpoint_every")
        same = self.average_of == "last" or self.checkpoint_every == self.valid_every
        require(same, "checkpoint_every", self.checkpoint_every, f"valid_every={self.valid_every} for the best")

    def _check_devices(self) -> None:
        """Check settings of several processes, and of compilation."""
        require(not (self.scale_loss and self.compile), "scale_loss", self.scale_loss, "0 for compile=True")
        if self.devices == 1:
            return
        together = "1: a model that carries state trains in one process"
        require(not self.model.recurrent, "devices", self.devices, together)
        if self.model.layer_drop and not isinstance(self, ImageRun | DetectionRun):  # these drop layers of samples
            specs = (self.model.norm, *self.model.norm_at.values())
            apart = not any(parse(spec)[1].get("sync") for spec in specs)
            allowed = "0 for sync=True: processes that drop different layers would wait for each other"
            require(apart, "model.layer_drop", self.model.layer_drop, allowed)

    @property
    def uses_validation(self) -> bool:
        """True if scores of the validation split decide how the run goes on, or what it keeps."""
        return bool(self.patience) or self.schedule == "validation_decay" or self.average_of == "best"

    def to_json(self) -> str:
        """Return the run as JSON for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "AnyRun":
        """Read what `to_json` wrote.

        Raises:
            ValueError: If the text is not JSON, or not the settings of a run.

        >>> run = G2PRun(name="toy", data="cmudict", steps=100)
        >>> Run.from_json(run.to_json()) == run
        True
        """
        try:
            return RUN.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not the settings of a run of this version: {explain(error)}") from None


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class PairRun(Run):
    """Settings of the tasks that rewrite a sequence as another one."""

    uses: ClassVar[tuple[str, ...]] = ("share", *_WORDS)
    one_shape: ClassVar[bool] = False

    bucketing: bool = True
    """Batches of sequences of similar length, with less padding; otherwise of any lengths."""
    beam: Count = 4
    """Width of beam search."""
    length_penalty: NotNegative = 0.6
    """Exponent of beam search's length penalty, ((offset + length) / (offset + 1)) ** length_penalty."""
    length_offset: NotNegative = 5.0
    """Offset of the length penalty: 5 as Wu et al. 2016, 0 as fairseq."""
    valid_items: Natural = 500
    """Pairs to validate on, evenly spaced; 0: all. BLEU uses all."""
    test_items: Natural = 2000
    """Pairs of the test split to score, evenly spaced; 0: all."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class G2PRun(PairRun):
    """Spelling to sound."""

    task: Literal["g2p"] = "g2p"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TranslationRun(PairRun):
    """Translation of text in subwords."""

    uses: ClassVar[tuple[str, ...]] = ("mask_logits", "share", *_WORDS)

    task: Literal["mt"] = "mt"
    subwords: Natural = 0
    """Size of each subword vocabulary; 0 uses the corpus' own."""
    valid_bleu: bool = False
    """Translate in each validation; BLEU instead of the loss then decides what is best."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class LanguageRun(Run):
    """Language modelling."""

    uses: ClassVar[tuple[str, ...]] = (
        "arch", "memory", "test_memory", "experts", "last_hidden", "weight_drop", "adaptive", *_WORDS,
    )  # fmt: skip

    task: Literal["lm"] = "lm"
    subwords: Natural = 0
    """Size of the subword vocabulary; 0 uses the corpus' own."""
    context: Count = 64
    """Words in a piece of text; a word attends to those before it in its piece."""
    test_context: Natural = 0
    """Words in a piece of the test split; 0 for those of `context`."""

    def __post_init__(self):
        super().__post_init__()
        longest, model = self.model.max_length, self.model
        tested = (0 if model.recurrent else model.memory_at_test) + (self.test_context or self.context)
        require(self.context <= longest, "context", self.context, f"at most max_length={longest}")
        require(tested <= longest, "test_context", tested, f"at most max_length={longest}, with test_memory")
        if model.arch == "lstm":
            recorded = self.record_every if self.quantities != ("gradient_norm",) else 0
            for name, value in (("record_every", recorded), ("scale_loss", self.scale_loss)):
                require(not value, name, value, "0 for model.arch=lstm, which has no norms")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DigitsRun(Run):
    """Classification of the digits of scikit-learn."""

    task: Literal["digits"] = "digits"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ImageRun(Run):
    """Image classification, from scratch or by fine-tuning."""

    uses: ClassVar[tuple[str, ...]] = ("arch", "image_size", "patch")

    task: Literal["images"] = "images"
    images: Images = Field(default_factory=Images)
    """Augmentation."""
    weights: str = ""
    """Fine-tuning: weights to start from, a safetensors file or a run folder; a new head is initialized."""
    body_lr: NotNegative = 1.0
    """Fine-tuning: learning rate of all parameters but the head's, as a fraction of lr."""
    ema: Below1 = 0.0
    """Decay of a moving average of the weights, which is scored and saved; 0 for none."""
    workers: Natural = 0
    """Processes that read and augment; 0 uses the training process."""

    def __post_init__(self):
        super().__post_init__()
        require(not (self.ema and self.average), "ema", self.ema, "0 with average: one average is enough")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DetectionRun(Run):
    """Object detection."""

    uses: ClassVar[tuple[str, ...]] = ("arch",)
    one_shape: ClassVar[bool] = False

    task: Literal["detection"] = "detection"
    label_smoothing: Annotated[float, Field(ge=0, le=0)] = 0.0
    """None: the losses are those of torchvision's detectors."""
    bucketing: bool = True
    """Batches of images of similar aspect ratio."""
    weights: str = ""
    """Weights of the backbone to start from, a safetensors file or a run folder."""
    workers: Natural = 0
    """Processes that read and augment; 0 uses the training process."""
    valid_items: Natural = 500
    """Images to validate on, evenly spaced; 0: all."""
    test_items: Natural = 2000
    """Images of the test split to score, evenly spaced; 0: all."""


AnyRun = G2PRun | TranslationRun | LanguageRun | DigitsRun | ImageRun | DetectionRun
RUN: TypeAdapter[AnyRun] = TypeAdapter(Annotated[AnyRun, Field(discriminator="task")])
