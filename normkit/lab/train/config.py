"""What to train: one frozen value that says everything, and is all that a run folder needs to be understood."""

import dataclasses
import json
from typing import Any, Literal

from normkit.lab.models.config import Model
from normkit.lab.tasks import TASKS, takers
from normkit.norms import parse
from normkit.watch.quantities import choose

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
SCHEDULES = ("cosine", "inverse_sqrt", "constant", "validation_decay", "steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """How pictures are shown to a classifier while it trains, and how at inference.

    >>> Images(mixup=0.8, cutmix=1.0).mix_prob
    1.0
    """

    crop: Literal["pad", "area", "none"] = "pad"
    """Training: a window of the picture with an edge of `padding` black pixels; one of 8 to 100 % of its area, resized
    (Inception); or all of it."""
    padding: int = 4
    """Pixels of the edge, at the size that the model takes."""
    flip: float = 0.5
    """Probability of a mirror image."""
    rand_augment: str = ""
    """timm's name of a RandAugment, as rand-m9-mstd0.5-inc1; empty for none."""
    erase: float = 0.0
    """Probability that noise replaces a rectangle (random erasing)."""
    mixup: float = 0.0
    """alpha of mixup: pictures and classes are blended in pairs, by a share of Beta(alpha, alpha); 0 for none."""
    cutmix: float = 0.0
    """alpha of CutMix: a rectangle comes from the other picture; 0 for none."""
    mix_prob: float = 1.0
    """Share of batches that are mixed, where mixup or cutmix is above 0."""
    mix_switch: float = 0.5
    """Share of mixed batches that are cut, where both are above 0."""
    test_crop: float = 1.0
    """Inference: side of the middle that is looked at, of the shorter side of the picture."""
    held_out: int = 0
    """Training pictures kept out for the looks at the validation split; 0 looks at the test split, as papers do."""
    channels_last: bool = False
    """Memory order of pictures and kernels that convolutions on GPUs like."""

    def __post_init__(self):
        _require(self.crop in ("pad", "area", "none"), "images.crop", self.crop, "pad, area or none")
        for field in ("padding", "mixup", "cutmix", "held_out"):
            _require(getattr(self, field) >= 0, f"images.{field}", getattr(self, field), "at least 0")
        for field in ("flip", "erase", "mix_prob", "mix_switch"):
            _require(0 <= getattr(self, field) <= 1, f"images.{field}", getattr(self, field), "from 0 to 1")
        _require(0 < self.test_crop <= 1, "images.test_crop", self.test_crop, "above 0, at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: data, model, optimizer, budget.

    >>> Run(name="toy", task="g2p", data="cmudict", steps=100).batch_tokens
    500
    """

    name: str
    """What the run is called; its results go to runs/NAME unless told otherwise."""
    task: str
    """A row of TASKS: g2p, mt, lm, digits, images or detection."""
    data: str
    """A row of SOURCES (cmudict, pydoc, digits), of CORPORA (multi30k.de-en, ptb, ...), of IMAGE_SETS (cifar10,
    imagenet, ...) or of SCENE_SETS (coco, ...), or a folder of text files or pictures."""
    subwords: int = 0
    """Size of each vocabulary of subwords; 0 takes the corpus' own choice."""
    context: int = 64
    """Words of a piece of running text: each sees those before it in its piece."""
    model: Model = dataclasses.field(default_factory=Model)
    """The model and its norms."""
    images: Images = dataclasses.field(default_factory=Images)
    """How pictures are shown; of task images."""
    weights: str = ""
    """Fine-tuning: a file of weights (safetensors) or a run folder to start from; what does not fit starts anew."""
    body_lr: float = 1.0
    """Fine-tuning: learning rate of all but the head, as a share of lr."""
    steps: int
    """Optimizer steps."""
    batch_tokens: int = 500
    """Symbols in a batch, source and target together where there are two; pictures in a batch of pictures."""
    bucketing: bool = True
    """Batches of sequences of about one length, less padding; otherwise of any lengths."""
    accumulate: int = 1
    """Batches to one optimizer step."""
    lr: float = 3e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    momentum: float = 0.9
    """SGD's momentum."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's averages."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Weight decay, of matrices only: norms, biases and other vectors are left alone."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 clips nothing."""
    label_smoothing: float = 0.1
    """Probability mass given to all classes alike."""
    schedule: Literal["cosine", "inverse_sqrt", "constant", "validation_decay", "steps"] = "cosine"
    """How the learning rate goes on after its warm-up."""
    floor_lr: float = 0.0
    """Where cosine ends, at the last step."""
    milestones: tuple[int, ...] = ()
    """Steps after which schedule=steps multiplies the learning rate by `decay`."""
    decay: float = 0.1
    """That factor."""
    warmup: int = 0
    """Steps until the learning rate has grown to its peak."""
    warmup_start: float = 0.0
    """Learning rate that inverse_sqrt, cosine and steps grow from, as fairseq's warmup-init-lr."""
    stop_lr: float = 0.0
    """Training ends when the learning rate, warmed up, falls below this."""
    patience: int = 0
    """Training ends after so many looks at the validation split without a better one; 0 goes on to the last step."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """The arithmetic, by Lightning's name."""
    compile: bool = False
    """Compile the model's forward and backward while it trains."""
    static: bool = False
    """Batches of few shapes: lengths rounded up, as many sentences for each length; what `compile` likes."""
    devices: int = 1
    """GPUs, or processes on CPUs, of each host; more than one train by `strategy`, each on `batch_tokens`."""
    nodes: int = 1
    """Hosts."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """How several devices share the work: each holds the whole model, or a part of it."""
    seed: int = 0
    """Seed of the weights, of dropout and of the order of the data."""
    valid_every: int = 0
    """Steps between looks at the validation split; 0 looks once, at the end."""
    valid_bleu: bool = False
    """Such a look translates too, and BLEU, not the loss, says which is better."""
    checkpoint_every: int = 0
    """Steps between checkpoints to resume from; 0 writes none."""
    keep: int = 5
    """Checkpoints kept."""
    average: int = 0
    """Average the weights of this many checkpoints at the end, or of those there are; of none, the last."""
    average_of: Literal["last", "best"] = "last"
    """Which checkpoints are kept and averaged: the last, or the best of the validation split."""
    ema: float = 0.0
    """Pictures: decay of a running average of the weights, which is then what is scored and saved; 0 for none."""
    workers: int = 0
    """Pictures: processes that read and augment; 0 does it in the process that trains."""
    broken: Literal["skip", "refuse"] = "skip"
    """Pictures and boxes that cannot be used, counts that are not the data set's: left out and counted, or an error."""
    record_every: int = 25
    """Steps between looks at the distance of batch and running statistics; 0 never looks."""
    quantities: tuple[str, ...] = ("default",)
    """What is recorded of the norms, names of normkit.watch.QUANTITIES; all adds what is dear to compute."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU where there is one."""
    beam: int = 4
    """Hypotheses of beam search."""
    length_penalty: float = 0.6
    """Exponent of beam search's length penalty, ((offset + length) / (offset + 1)) ** length_penalty."""
    length_offset: float = 5.0
    """That offset: 5 as Wu et al. 2016, 0 as fairseq."""
    valid_items: int = 500
    """Items that the loss of the validation split is of where sequences are translated, evenly spread over it; 0 takes
    all. BLEU of such a look is of all."""
    test_items: int = 2000
    """Test items that sequences are searched for, evenly spread over the test split; 0 takes all."""
    threads: int | None = None
    """CPU threads; None leaves them to PyTorch."""

    def __post_init__(self):
        object.__setattr__(self, "quantities", tuple(self.quantities))  # JSON has lists
        object.__setattr__(self, "milestones", tuple(self.milestones))
        choose(self.quantities)
        least = {"steps": 1, "batch_tokens": 1, "accumulate": 1, "warmup": 0, "valid_every": 0, "checkpoint_every": 0,
                 "keep": 1, "average": 0, "record_every": 0, "test_items": 0, "valid_items": 0, "subwords": 0,
                 "context": 1, "patience": 0, "beam": 1, "devices": 1, "nodes": 1, "workers": 0}  # fmt: skip
        for field, minimum in least.items():
            _require(getattr(self, field) >= minimum, field, getattr(self, field), f"at least {minimum}")
        _require(self.lr > 0, "lr", self.lr, "above 0")
        longest = self.model.max_length
        _require(self.task != "lm" or self.context <= longest, "context", self.context, f"at most max_length={longest}")
        not_below_0 = "clip eps warmup_start stop_lr length_penalty length_offset floor_lr body_lr"
        for field in not_below_0.split():
            _require(getattr(self, field) >= 0, field, getattr(self, field), "at least 0")
        for field in ("ema", "momentum"):
            _require(0 <= getattr(self, field) < 1, field, getattr(self, field), "at least 0 and below 1")
        _require(self.optimizer in ("adamw", "sgd"), "optimizer", self.optimizer, "adamw or sgd")
        _require(self.broken in ("skip", "refuse"), "broken", self.broken, "skip or refuse")
        for name in sorted({name for task in TASKS.values() for name in task.settings}):
            owner, field = (self.model, name.removeprefix("model.")) if name.startswith("model.") else (self, name)
            given, tasks = getattr(owner, field), takers(name)
            default = owner.__dataclass_fields__[field].default
            allowed = f"left out for task {self.task}; it is of {' and '.join(tasks)}"
            _require(self.task in tasks or given == default, name, given, allowed)
        _require(not (self.ema and self.average), "ema", self.ema, "0 with average: one average is enough")
        averages = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require(averages, "betas", self.betas, "two numbers, each at least 0 and below 1")
        _require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        _require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1, or None")
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        _require(rising, "milestones", self.milestones, "steps, each later than the one before")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "at least 0 and below 1")
        _require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        rises = self.schedule != "inverse_sqrt" or self.warmup > 0
        _require(rises, "warmup", self.warmup, "at least 1 for schedule=inverse_sqrt (constant and others need none)")
        _require(self.average <= self.keep, "average", self.average, f"at most keep={self.keep}")
        _require(self.strategy in ("ddp", "fsdp2"), "strategy", self.strategy, "ddp or fsdp2")
        several = self.devices * self.nodes > 1
        if several and self.model.layer_drop and not (self.task in TASKS and TASKS[self.task].drops_samples):
            specs = (self.model.norm, *self.model.norm_at.values())
            alone = self.strategy == "ddp" and not any(parse(spec)[1].get("sync") for spec in specs)
            allowed = "0 for fsdp2 and sync=True: processes that drop different layers would wait for each other"
            _require(alone, "model.layer_drop", self.model.layer_drop, allowed)
        whole = self.strategy != "fsdp2" or not several
        _require(whole or not self.record_every, "record_every", self.record_every, "0 for strategy=fsdp2")
        _require(self.average_of in ("last", "best"), "average_of", self.average_of, "last or best")
        if self.patience or self.average_of == "best":
            _require(self.valid_every > 0, "valid_every", self.valid_every, "above 0 for patience and average_of=best")
        if self.average_of == "best":
            same = self.checkpoint_every == self.valid_every
            _require(same, "checkpoint_every", self.checkpoint_every, f"valid_every={self.valid_every} for the best")
        _require(not self.average or self.checkpoint_every > 0, "average", self.average, "0 without checkpoint_every")

    def to_json(self) -> str:
        """The run as text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Run":
        """The run that `to_json` wrote; ValueError where it is not one.

        >>> run = Run(name="toy", task="g2p", data="cmudict", steps=100)
        >>> Run.from_json(run.to_json()) == run
        True
        """
        try:
            given: dict[str, Any] = json.loads(text)
            parts = {"model": Model(**given["model"]), "images": Images(**given.get("images", {}))}
            return cls(**{**given, **parts, "betas": tuple(given["betas"])})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not the settings of a run of this version: {error}") from None


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
