"""Settings of a training run in groups: data, batches, optimizer, schedule and others.

`Run` inherits from all groups, so that each setting has one flat name everywhere: `run.lr` in code, `--lr` on the
command line, `"lr"` in `run.json` and in studies. A function that needs one group takes it as the type of its argument.
"""

import dataclasses
from typing import ClassVar, Literal

from normkit._util import require
from normkit.watch.quantities import choose
from normkit_papers.fields import Checked, limited
from normkit_papers.models.config import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Checked):
    """Augmentation of training images, and the view of an image at inference.

    >>> Images(mixup=0.8, cutmix=1.0).mix_prob
    1.0
    """

    prefix: ClassVar[str] = "images."

    crop: Literal["pad", "area", "none"] = "pad"
    """Training: a window of the image padded by `padding` black pixels; a resized window of 8 to 100 % of its area
    (Inception); or the whole image."""
    padding: int = limited(4, at_least=0)
    """Padding on each side, in pixels at the size of the model's input."""
    flip: float = limited(0.5, at_least=0, at_most=1)
    """Probability of a horizontal flip."""
    rand_augment: str = ""
    """RandAugment by timm's name, e.g. rand-m9-mstd0.5-inc1; empty for none."""
    erase: float = limited(0.0, at_least=0, at_most=1)
    """Probability that noise replaces a rectangle (random erasing)."""
    mixup: float = limited(0.0, at_least=0)
    """Alpha of mixup: pairs of images and labels are blended by a Beta(alpha, alpha) weight; 0 for none."""
    cutmix: float = limited(0.0, at_least=0)
    """Alpha of CutMix: a rectangle is taken from the other image; 0 for none."""
    mix_prob: float = limited(1.0, at_least=0, at_most=1)
    """Fraction of batches that are mixed, if mixup or cutmix is above 0."""
    mix_switch: float = limited(0.5, at_least=0, at_most=1)
    """Fraction of mixed batches that use CutMix, if both are above 0."""
    test_crop: float = limited(1.0, above=0, at_most=1)
    """Inference: side of the centre crop, as a fraction of the shorter side."""
    held_out: int = limited(0, at_least=0)
    """Training images held out for validation; 0 validates on the test split, as papers do."""
    channels_last: bool = False
    """Memory format of images and kernels, faster for convolutions on GPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Checked):
    """Task and data."""

    name: str
    """Name of the run; its folder is runs/NAME by default."""
    task: str
    """Task: g2p, mt, lm, digits, images or detection."""
    data: str
    """Name of a data set (cmudict, multi30k.de-en, ptb, cifar10, coco, ...), or a folder of text files or images."""
    subwords: int = limited(0, at_least=0)
    """Text: size of each subword vocabulary; 0 uses the corpus' own."""
    context: int = limited(64, at_least=1)
    """Language models: words in a piece of text; a word attends to those before it in its piece."""
    broken: Literal["skip", "refuse"] = "skip"
    """Unreadable images, unusable boxes, unexpected counts: skip and count them, or stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(Checked):
    """The model, its input and its initial weights."""

    model: Model = dataclasses.field(default_factory=Model)
    """The model and its norms."""
    images: Images = dataclasses.field(default_factory=Images)
    """Augmentation of images, for task images."""
    weights: str = ""
    """Fine-tuning: weights to start from, a safetensors file or a run folder; a new head is initialized."""
    body_lr: float = limited(1.0, at_least=0)
    """Fine-tuning: learning rate of all parameters but the head's, as a fraction of lr."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching(Checked):
    """Length of the training and size of its batches."""

    steps: int = limited(at_least=1)
    """Optimizer steps."""
    batch_tokens: int = limited(500, at_least=1)
    """Batch size: tokens (of source and target, if there are two), or images."""
    bucketing: bool = True
    """Batches of sequences of similar length, with less padding; otherwise of any lengths."""
    bucket_by: Literal["both", "source"] = "both"
    """Bucketing of pairs: by the lengths of source and target, or by the source's alone."""
    accumulate: int = limited(1, at_least=1)
    """Batches per optimizer step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization(Checked):
    """Optimizer and loss."""

    lr: float = limited(3e-3, above=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd", "nt-asgd"] = "adamw"
    """AdamW; SGD with momentum; or NT-ASGD: SGD with averaging once validation stops improving."""
    momentum: float = limited(0.9, at_least=0, below=1)
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Betas of AdamW."""
    eps: float = limited(1e-8, at_least=0)
    """Epsilon of AdamW."""
    weight_decay: float = limited(0.0, at_least=0)
    """Weight decay of matrices; norms, biases and other vectors have none."""
    clip: float = limited(1.0, at_least=0)
    """Maximum norm of the gradient; 0 for no clipping."""
    label_smoothing: float = limited(0.1, at_least=0, below=1)
    """Label smoothing."""
    scale_loss: float = limited(0.0, at_least=0)
    """Weight of `normkit.scale_loss`, which draws the sizes of tokens together; 0 for none."""

    def __post_init__(self):
        super().__post_init__()
        fractions = all(0 <= beta < 1 for beta in self.betas)
        require(fractions, "betas", self.betas, "two numbers, each at least 0 and below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """Learning rate over time, and when training ends early."""

    schedule: Literal["cosine", "inverse_sqrt", "constant", "validation_decay", "steps"] = "cosine"
    """Learning rate after the warm-up."""
    floor_lr: float = limited(0.0, at_least=0)
    """Final learning rate of schedule=cosine."""
    milestones: tuple[int, ...] = ()
    """Steps after which schedule=steps multiplies the learning rate by `decay`."""
    decay: float = limited(0.1, above=0)
    """Factor at each milestone."""
    warmup: int = limited(0, at_least=0)
    """Steps of linear warm-up."""
    warmup_start: float = limited(0.0, at_least=0)
    """Initial learning rate of the warm-up, for inverse_sqrt, cosine and steps (fairseq's warmup-init-lr)."""
    stop_lr: float = limited(0.0, at_least=0)
    """Stop when the learning rate falls below this after the warm-up."""
    patience: int = limited(0, at_least=0)
    """Stop after this many validations without improvement; 0 never stops early."""

    def __post_init__(self):
        super().__post_init__()
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        require(rising, "milestones", self.milestones, "steps, each later than the one before")
        warm = self.schedule != "inverse_sqrt" or self.warmup > 0
        require(warm, "warmup", self.warmup, "at least 1 for schedule=inverse_sqrt (constant and others need none)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(Checked):
    """Arithmetic and devices."""

    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision, by Lightning's name."""
    compile: bool = False
    """Compile the model's forward and backward with torch.compile."""
    static: bool = False
    """Few batch shapes, for `compile`: lengths are rounded up, and each length has one number of sentences."""
    devices: int = limited(1, at_least=1)
    """GPUs, or CPU processes, per node; each trains on batches of `batch_tokens`."""
    nodes: int = limited(1, at_least=1)
    """Nodes."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """Parallelism of several devices: each holds the whole model, or a shard of it."""
    seed: int = limited(0, at_least=-(2**43), at_most=2**43)
    """Seed of weights, dropout and data order; the order of an epoch has the seed `1_000_003 * seed + epoch`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto uses a GPU if there is one."""
    threads: int | None = limited(None, at_least=1, at_most=1024)  # PyTorch crashes if the system cannot start them
    """CPU threads; None uses PyTorch's default."""
    workers: int = limited(0, at_least=0)
    """Images: processes that read and augment; 0 uses the training process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """Validation, scores on the test split, and records of the norms."""

    valid_every: int = limited(0, at_least=0)
    """Steps between validations; 0 validates once, at the end."""
    valid_bleu: bool = False
    """Translate in each validation; BLEU instead of the loss then decides what is best."""
    test_context: int = limited(0, at_least=0)
    """Language models: words in a piece of the test split; 0 for those of `context`."""
    record_every: int = limited(25, at_least=0)
    """Steps between records of the norms' statistics; 0 for no records."""
    quantities: tuple[str, ...] = ("default",)
    """Recorded quantities, names of normkit.watch.QUANTITIES; all includes those that are expensive."""
    beam: int = limited(4, at_least=1)
    """Width of beam search."""
    length_penalty: float = limited(0.6, at_least=0)
    """Exponent of beam search's length penalty, ((offset + length) / (offset + 1)) ** length_penalty."""
    length_offset: float = limited(5.0, at_least=0)
    """Offset of the length penalty: 5 as Wu et al. 2016, 0 as fairseq."""
    valid_items: int = limited(500, at_least=0)
    """Text pairs, or images with boxes, to validate on, evenly spaced; 0: all. BLEU uses all."""
    test_items: int = limited(2000, at_least=0)
    """Text pairs, or images with boxes, of the test split to score, evenly spaced; 0: all."""

    def __post_init__(self):
        super().__post_init__()
        choose(self.quantities)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints(Checked):
    """Checkpoints and averages of weights."""

    checkpoint_every: int = limited(0, at_least=0)
    """Steps between checkpoints to resume from; 0 for none."""
    keep: int = limited(5, at_least=1)
    """Checkpoints kept."""
    average: int = limited(0, at_least=0)
    """Average the weights of up to this many checkpoints at the end; without any checkpoint, use the last weights."""
    average_of: Literal["last", "best"] = "last"
    """Checkpoints to keep and average: the last ones, or the best of the validations."""
    ema: float = limited(0.0, at_least=0, below=1)
    """Images: decay of a moving average of the weights, which is scored and saved; 0 for none."""

    def __post_init__(self):
        super().__post_init__()
        require(not (self.ema and self.average), "ema", self.ema, "0 with average: one average is enough")
        require(self.average <= self.keep, "average", self.average, f"at most keep={self.keep}")
        require(not self.average or self.checkpoint_every > 0, "average", self.average, "0 without checkpoint_every")
