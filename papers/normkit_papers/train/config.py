"""A training run as one frozen dataclass.

A run folder needs nothing else to be understood.
"""

import dataclasses
import json
from typing import Self

from normkit._util import require
from normkit.norms import parse
from normkit_papers.tasks import TASKS, takers
from normkit_papers.train.settings import (
    Architecture,
    Batching,
    Checkpoints,
    Data,
    Evaluation,
    Hardware,
    Images,
    Optimization,
    Schedule,
)

__all__ = ["Images", "Run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Checkpoints, Evaluation, Hardware, Schedule, Optimization, Batching, Architecture, Data):
    """A training run: all groups of settings.

    Fields are in the order from the last base class to the first.

    Raises:
        ValueError: If a setting, or a combination of settings, is not allowed.

    >>> Run(name="toy", task="g2p", data="cmudict", steps=100).batch_tokens
    500
    """

    def __post_init__(self):
        super().__post_init__()
        inside = ".." not in self.name.split("/") and not self.name.startswith("/")
        require(inside, "name", self.name, "a relative path without .., as it is part of a folder's path")
        self._check_task()
        self._check_devices()
        self._check_schedule()
        require(not (self.scale_loss and self.compile), "scale_loss", self.scale_loss, "0 for compile=True")
        if self.average_of == "best":
            same = self.checkpoint_every == self.valid_every
            require(same, "checkpoint_every", self.checkpoint_every, f"valid_every={self.valid_every} for the best")

    def _check_task(self) -> None:
        """Check settings that only some tasks accept."""
        spec = TASKS.get(self.task)
        if spec is None:  # an error where the task is looked up
            return
        if self.model.arch == "lstm":
            recorded = self.record_every if self.quantities != ("gradient_norm",) else 0
            for name, value in (("record_every", recorded), ("scale_loss", self.scale_loss)):
                require(not value, name, value, "0 for model.arch=lstm, which has no norms")
        longest = self.model.max_length
        if spec.fixed_length:
            before = 0 if self.model.recurrent else self.model.memory_at_test
            tested = before + (self.test_context or self.context)
            require(self.context <= longest, "context", self.context, f"at most max_length={longest}")
            require(tested <= longest, "test_context", tested, f"at most max_length={longest}, with test_memory")
        for name, tasks in takers().items():
            *owner, field = name.split(".")
            settings = getattr(self, owner[0]) if owner else self
            given = getattr(settings, field)
            if self.task not in tasks and given != settings.__dataclass_fields__[field].default:
                allowed = f"left out for task {self.task}; it applies to {' and '.join(tasks)}"
                require(False, name, given, allowed)

    def _check_schedule(self) -> None:
        """Check settings of the schedule against steps, learning rates and validations."""
        if self.schedule == "steps" and self.milestones:
            first = min(self.warmup, self.steps - 1)
            require(self.milestones[0] > first, "milestones", self.milestones, f"after the warm-up of {first} steps")
        require(self.warmup_start <= self.lr, "warmup_start", self.warmup_start, f"at most lr={self.lr:g}")
        falls = self.schedule != "cosine" or self.floor_lr <= self.lr * self.body_lr
        require(falls, "floor_lr", self.floor_lr, f"at most lr * body_lr = {self.lr * self.body_lr:g}")
        allowed = "above 0 for patience, average_of=best, schedule=validation_decay and optimizer=nt-asgd"
        require(self.valid_every > 0 or not self.uses_validation, "valid_every", self.valid_every, allowed)

    @property
    def uses_validation(self) -> bool:
        """True if scores of the validation split decide how the run goes on, or what it keeps."""
        stagnates = self.patience or self.schedule == "validation_decay" or self.optimizer == "nt-asgd"
        return bool(stagnates) or self.average_of == "best"

    def _check_devices(self) -> None:
        """Check settings of several processes."""
        if self.devices * self.nodes == 1:
            return
        together = "1: a model that carries state trains in one process"
        require(not self.model.recurrent, "devices * nodes", self.devices * self.nodes, together)
        fsdp2, spec = self.strategy == "fsdp2", TASKS.get(self.task)
        require(not (fsdp2 and self.record_every), "record_every", self.record_every, "0 for strategy=fsdp2")
        if self.model.layer_drop and not (spec and spec.drops_samples):
            specs = (self.model.norm, *self.model.norm_at.values())
            apart = not fsdp2 and not any(parse(spec)[1].get("sync") for spec in specs)
            allowed = "0 for fsdp2 and sync=True: processes that drop different layers would wait for each other"
            require(apart, "model.layer_drop", self.model.layer_drop, allowed)

    def to_json(self) -> str:
        """Return the run as JSON for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Settings that an older version did not have get their defaults.

        Raises:
            ValueError: If the text is not JSON, or not the settings of a run.

        >>> run = Run(name="toy", task="g2p", data="cmudict", steps=100)
        >>> Run.from_json(run.to_json()) == run
        True
        """
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not the settings of a run of this version: {error}") from None
