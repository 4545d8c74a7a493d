"""Batches and scores of models whose norms are removed.

A run of ours, or a Hugging Face folder with text.
"""

import copy
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.fold import Report, fold
from normkit.fold.folders import copy_input_files, example_for, is_pretrained_dir
from normkit.models import load_pretrained, save_pretrained
from normkit.norms import Norm
from normkit_papers.data.corpora import CORPORA, locate
from normkit_papers.data.lines import read_lines
from normkit_papers.data.vocab import PAD
from normkit_papers.tasks import TASKS
from normkit_papers.train.distill import Outputs, distance, pooled
from normkit_papers.train.fold_run import fold_run, with_norms
from normkit_papers.train.folder import Loaded, load, save
from normkit_papers.train.language import Language
from normkit_papers.train.scale_rows import scale_rows
from normkit_papers.train.source import open_task

HELD_OUT = 400  # texts to measure on
BATCH, LENGTH = 24, 48  # texts of a batch, and tokens of a text that count
TOGETHER = 20  # batches of texts sorted by length together, so that little is padding
SHORT = 4  # words; shorter texts are headings


class RemovableRun:
    """A run: its training batches and, for the tail of losses, its validation split."""

    mask_from = None  # models of ours pass masks to their norms

    def __init__(self, folder: Path):
        self.loaded = load(folder)
        run, self.model, _ = self.loaded
        if TASKS[run.task].part:
            raise ValueError(f"{folder} is a run of task {run.task}; its norms cannot be removed by this command")
        self.task = open_task(self.loaded)
        self.lr = run.lr / 3
        self.has_padding = "source" in self.loaded.vocabularies

    def student(self, batches: list[Any]) -> nn.Module:
        """Return the model whose norms are replaced."""
        return self.model

    def batches(self, start: int, fresh: bool = True) -> Iterator[Any]:
        """Yield training batches from a number on, other ones than training began with.

        A model that carries state begins without it, unless `fresh` is False.
        """
        for number, batch in enumerate(self.task.batches(100_000 + start)):
            yield batch._replace(fresh=True) if fresh and not number else batch

    def carried(self, models: Sequence[nn.Module]) -> list[Any]:
        """Return the state that each model carries into its next batch, for `carry`."""
        return [self.task.carried.get(model, {}) for model in models] if isinstance(self.task, Language) else []

    def carry(self, models: Sequence[nn.Module], states: list[Any]) -> None:
        """Restore what `carried` returned."""
        if isinstance(self.task, Language):
            self.task.carried.update(zip(models, states, strict=True))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits."""
        return self.task.forward_norms(model, batch)

    def outputs(self, model: nn.Module, batch: Any) -> Outputs:
        """Return the logits, and which of them are of real tokens."""
        target = batch.tensors[-1]
        return Outputs(self.forward(model, batch), target != PAD if self.has_padding else None, logits=True)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the task."""
        self.task.model = model
        return self.task.loss(batch, self.loaded.run.label_smoothing)

    @torch.no_grad()
    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return the task's first metric on the test split, by greedy search."""
        self.task.model = model
        metric = TASKS[self.loaded.run.task].metrics[0]
        return {metric.name: self.task.score_test()[metric.key]}

    @torch.no_grad()
    def tail(self, model: nn.Module) -> tuple[str, Tensor]:
        """Return the loss of each token of the validation split."""
        losses = []
        for batch in self.task.validation_batches():
            logits, real, _ = self.outputs(model, batch)
            each = F.cross_entropy(logits.flatten(0, -2), batch.tensors[-1].flatten(), reduction="none")
            losses.append(each if real is None else each[real.flatten()])
        item = "a token" if self.has_padding else "an item"
        return f"loss of {item} of the validation split", torch.cat(losses)

    def fold_and_save(self, model: nn.Module, out: Path) -> tuple[nn.Module, Report]:
        """Fold the model into a run folder."""
        run, _, vocabularies = self.loaded
        folded, report = fold_run(Loaded(run, model, vocabularies))
        save(out, folded)
        return folded.model, report

    def save(self, model: nn.Module, out: Path) -> None:
        """Write a run folder of the model with its norms."""
        run, _, vocabularies = self.loaded
        specs = {name: module.spec for name, module in model.named_modules() if isinstance(module, Norm)}
        save(out, Loaded(with_norms(run, specs), model, vocabularies))


class RemovableText:
    """A model of Hugging Face that reads tokens, with its tokenizer and a text."""

    mask_from = "attention_mask"
    lr = 3e-4

    def __init__(self, folder: Path, text: str):
        self.folder, self.model = folder, load_pretrained(folder)
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ValueError(f"{folder} holds no tokenizer; write it there with `tokenizer.save_pretrained`")
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer.padding_side = "right"  # on the left, a padding token would predict the first token of a text
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.train, self.held_out = _texts(text)
        self.causal = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if len(self.train) < TOGETHER * BATCH:
            raise ValueError(f"{text} has {len(self.train)} texts to train on; needs {TOGETHER * BATCH} or more")

    def student(self, batches: list[dict[str, Tensor]]) -> nn.Module:
        """Return the model whose norms are replaced.

        Rows of its embeddings are scaled if that changes little, and stay: Adam would move the row of a rare token by a
        full step for each single gradient.
        """
        model = copy.deepcopy(scale_rows(self.model, batches, self.outputs))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
        return model

    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """Return tokens and their mask."""
        found = self.tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        return {key: found[key] for key in ("input_ids", "attention_mask")}

    def batches(self, start: int, fresh: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield batches without end from a number on; texts of a batch have similar lengths.

        `fresh` is for models that carry state, which these do not.
        """
        rows = TOGETHER * BATCH
        blocks, block, skip = len(self.train) // rows, start // TOGETHER, start % TOGETHER
        while True:
            at = block % blocks * rows
            texts = sorted(self.train[at : at + rows], key=len)
            order = random.Random(block).sample(range(TOGETHER), TOGETHER)
            yield from (self.encode(texts[i * BATCH : (i + 1) * BATCH]) for i in order[skip:])
            block, skip = block + 1, 0

    def carried(self, models: Sequence[nn.Module]) -> list[Any]:
        """Return nothing: no model carries state."""
        return []

    def carry(self, models: Sequence[nn.Module], states: list[Any]) -> None:
        """Restore nothing."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        """Call the model."""
        return model(**batch)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> Outputs:
        """Return logits if the model has a head, of tokens or of texts, else vectors of tokens."""
        found = model(**batch)
        logits = hasattr(found, "logits")
        values = found.logits if logits else found.last_hidden_state
        return Outputs(values, batch["attention_mask"].bool() if values.dim() == 3 else None, logits)

    @torch.no_grad()
    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return scores on held-out texts: the loss, or the likeness to the original.

        Models with other logits have a divergence, those without a cosine. "neighbours" are the texts, in percent,
        whose nearest other text is the same.
        """
        if self.causal:
            return {"loss": float(self._next_token(model).mean())}
        pairs = [(self.outputs(model, b), self.outputs(self.model, b)) for b in self._held_out()]
        if pairs[0][0].logits:
            return {"divergence": float(torch.cat([distance(*pair) for pair in pairs]).mean())}
        mine, theirs = (F.normalize(torch.cat([pooled(pair[at], pair[1].real) for pair in pairs])) for at in (0, 1))
        cosine = (mine * theirs).sum(1)
        same = float((_nearest(mine) == _nearest(theirs)).double().mean())
        return {"cosine": float(cosine.mean()), "worst 1 %": float(cosine.quantile(0.01)), "neighbours %": 100 * same}

    @torch.no_grad()
    def tail(self, model: nn.Module) -> tuple[str, Tensor]:
        """Return loss, or distance from the original, of each held-out token.

        Of each text, if the model has one output a text.
        """
        if self.causal:
            return "loss of a held-out token", self._next_token(model)
        pairs = [(self.outputs(model, batch), self.outputs(self.model, batch)) for batch in self._held_out()]
        item = "text" if pairs[0][1].real is None else "token"
        kind = f"{'divergence' if pairs[0][0].logits else '1 - cosine'} of a held-out {item}"
        return kind, torch.cat([distance(*pair) for pair in pairs])

    def fold_and_save(self, model: nn.Module, out: Path) -> tuple[nn.Module, Report]:
        """Fold the model into a folder, with the tokenizer."""
        folded, report = fold(model, **example_for(model))
        self.save(folded, out)
        return folded, report

    def save(self, model: nn.Module, out: Path) -> None:
        """Write a folder with the model and the tokenizer."""
        save_pretrained(model, out)
        copy_input_files(self.folder, out)  # the tokenizer in use cuts and pads texts, and would save that

    def _held_out(self) -> list[dict[str, Tensor]]:
        return [self.encode(self.held_out[at : at + 50]) for at in range(0, len(self.held_out), 50)]

    def _next_token(self, model: nn.Module) -> Tensor:
        losses = []
        for batch in self._held_out():
            logits, target = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
            real = batch["attention_mask"][:, 1:].bool()
            losses.append(F.cross_entropy(logits[real].float(), target[real], reduction="none"))
        return torch.cat(losses)


def open_removable(folder: Path, text: str | None) -> RemovableRun | RemovableText:
    """Open a run or a Hugging Face folder.

    Raises:
        ValueError: If it is neither, or a text is given for a run or missing for the other.
    """
    if is_pretrained_dir(folder):
        if text is None:
            raise ValueError(f"{folder} is a Hugging Face model; name a text to train on, --text FILE or a corpus")
        return RemovableText(folder, text)
    if text is not None:
        raise ValueError(f"{folder} is a run, which trains on its own data; leave --text out")
    return RemovableRun(folder)


def _texts(name: str) -> tuple[list[str], list[str]]:
    """Return texts to train on and held-out ones, from a file or a corpus of running text."""
    if name in CORPORA:
        found = locate(name)
        if found.corpus.kind != "text":
            raise ValueError(f"{name} is a corpus of kind {found.corpus.kind}; name one of running text, or a file")
        train, test = (_sentences(line for (line,) in found.lines(split)) for split in ("train", "test"))
    elif Path(name).is_file():
        every = _sentences(read_lines(Path(name)))
        train, test = [text for i, text in enumerate(every) if i % 20], every[::20]
    else:
        raise ValueError(f"--text {name} is neither a file nor a corpus; corpora are {', '.join(CORPORA)}")
    mixed: list[list[str]] = [random.Random(0).sample(each, len(each)) for each in (train, test)]
    return mixed[0], mixed[1][:HELD_OUT]


def _sentences(lines: Iterator[str]) -> list[str]:
    """Cut lines at the ends of sentences, without headings and the marks of tokenized corpora.

    >>> _sentences(iter(["= A heading =", "A well @-@ known bird sings , too . It is small , they say ."]))
    ['A well-known bird sings, too .', 'It is small, they say .']
    """
    plain = (re.sub(r" @(.)@ ", r"\1", line).replace(" ,", ",") for line in lines)
    parts = [part.strip() for line in plain for part in re.split(r"(?<=[.!?])\s+", line)]
    return [part for part in parts if len(part.split()) >= SHORT and not part.startswith("=")]


def _nearest(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)
