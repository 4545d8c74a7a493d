"""Remove the norms of the model in a Hugging Face folder, for the command."""

import csv
import dataclasses
import functools
import io
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit._util import align, require, write_whole
from normkit.fold import fold
from normkit.fold.checkpoints import copy_small_files
from normkit.fold.folders import example_for
from normkit.models import load_pretrained, save_pretrained
from normkit.models.first_token import keep_first_token
from normkit.removal.distill import mask_of, pick_output, pooled
from normkit.removal.large_tokens import large_first_token
from normkit.removal.remove import Removal, remove_norms
from normkit.removal.state import check_out, claimed
from normkit.removal.texts import SHORTEST, Texts, read_text, split

LONGEST = 512  # tokens of a text by default, where the model takes more
LENGTHS = (16, 64, 256, 1024)  # tokens at which the report measures, up to the longest text
ITEMS = 128  # texts at each length
WINDOWS, SCORED = 4, 32  # texts to score on, for language models and others
PROMPT, CONTINUED = 16, 24  # tokens
BUDGET = 0.1  # nats, of a language model by default
FILE, COSTS = "removal.json", "costs.csv"
TERMS = {
    "encoder": "cosine: between a text's vector of the model without norms and of the original, 1 if equal; worst 1 %: "
    "1 % of the texts are below; same nearest: texts whose nearest other text is the same.",
    "causal": "perplexity: of the next token, by position in the text; same next: tokens after which both models find "
    "the same token most likely.",
    "head": "divergence: Kullback-Leibler, of the output from the original's, in nats; same class: outputs whose most "
    "likely class is the same.",
}
WIDTH = 118  # characters of a line


@dataclass(frozen=True)
class Settings:
    """Settings of `remove_norms_dir`.

    Attributes:
        text: Text to train on: a file with one text a line, or a data set of the Hub.
        second: Another such text, which is measured on alone.
        steps: Training steps, after which no norm is left; None for 300.
        budget: Largest rise of loss or cosine distance, without training; None to train. A language model gets 0.1
            nats if neither is given.
        length: Most tokens of a text; None for the model's, at most 512.
        lr: Highest learning rate.
        spread: Limit that `fold` gets; 16 suits float16 and 8-bit integers.
        device: "cpu" or "cuda".
        seed: Seed of the order of texts.
    """

    text: str
    second: str | None = None
    steps: int | None = None
    budget: float | None = None
    length: int | None = None
    lr: float = 3e-4
    spread: float | None = None
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class DirRemoval:
    """Result of `remove_norms_dir`; prints with tables.

    Attributes:
        removal: The result of `remove_norms`.
        rows: Scores by text and length.
        terms: What the scores mean.
        about: What was trained on, and what not to expect.
        samples: A text and how both models continue it, for language models.
        load: Two lines that load the model.
    """

    removal: Removal
    rows: list[dict[str, Any]]
    terms: str
    about: str
    samples: dict[str, str]
    load: str

    def __str__(self) -> str:
        table = [[*self.rows[0]], *([_text(value) for value in row.values()] for row in self.rows)]
        samples = "\n".join(f"{name}: {text!r}" for name, text in self.samples.items())
        table = align(table, right=range(1, len(table[0])), heads=1)
        text = "\n\n".join(filter(None, [str(self.removal), f"{table}\n{self.terms}", samples, self.about]))
        return "\n".join(textwrap.fill(line, WIDTH) for line in text.splitlines()) + f"\n\n{self.load}"


def remove_norms_dir(
    path: Path | str,
    out: Path | str,
    settings: Settings,
    *,
    resume: bool = False,
    on_progress: Callable[[str, int, int, float], object] | None = None,
) -> DirRemoval:
    """Remove the norms of the model in a folder, and write the folded model to another folder.

    Args:
        path: Folder of a Hugging Face model with safetensors and a tokenizer.
        out: Folder for the result: model, tokenizer and all small files; `removal.json` has the report, `costs.csv` the
            costs of norms with a budget.
        settings: What to do.
        resume: Continue an interrupted training with the same settings.
        on_progress: Called as `on_progress(stage, done, of, seconds left)`.

    Raises:
        ValueError: If an argument is wrong, or `out` has files.
    """
    path, out = Path(path), Path(out)
    check_out(path, out, resume)
    model = load_pretrained(path)
    dtype = next(model.parameters()).dtype
    model = model.float().to(settings.device)
    tokenizer = _tokenizer(path)
    kind = _kind(model)
    length = settings.length or min(longest(path, model, tokenizer), LONGEST)
    if settings.length is not None:
        most = min(_positions(model) or length, tokenizer.model_max_length)
        require(SHORTEST <= length <= most, "--length", length, f"from {SHORTEST} to {most} tokens")
    lines, held_out = split(read_text(settings.text))
    make = functools.partial(Texts, tokenizer=tokenizer, length=length, causal=kind == "causal", device=settings.device)
    texts, others = make(lines), {"held out": make(held_out)}
    if settings.second is not None:
        others["second text"] = make(read_text(settings.second))
    first, budget = "", settings.budget
    if kind == "causal":
        first = _constant_first_token(model, tokenizer, texts, [*others.values()])
        budget = BUDGET if budget is None and settings.steps is None else budget
    measured = others["held out"].of_length(length, WINDOWS if kind == "causal" else SCORED)
    with claimed(path, out, dataclasses.asdict(settings), resume) as checkpoint:
        score = functools.partial(_mean_loss, measured) if kind == "causal" else None
        folded, removal = remove_norms(
            model, texts.training(settings.seed), steps=settings.steps, budget=budget, lr=settings.lr,
            held_out=measured, score=score, clamp=kind == "causal",
            unit="loss of the next token, in nats" if kind == "causal" else "",
            fold=lambda trained: fold(trained, **_example(trained, settings.device), spread=settings.spread),
            seed=settings.seed, checkpoint=checkpoint, on_progress=on_progress,
        )  # fmt: skip
        folded = folded.to(dtype)
        save_pretrained(folded, out)
        copy_small_files(path, out)
        if first and texts.added:
            _without_added_tokens(tokenizer).save_pretrained(out)
        pool = _pooling(path)
        rows = [
            {"text": name, **row} for name, other in others.items() for row in _rows(kind, folded, model, other, pool)
        ]
        found = DirRemoval(
            removal, rows, TERMS[kind], f"{_about(settings, length, removal)}{first}",
            _continue(tokenizer, model, folded, others["held out"]) if kind == "causal" else {}, _load_lines(path, out),
        )  # fmt: skip
        kept = {"settings": dataclasses.asdict(settings), **dataclasses.asdict(found), "fold": str(removal.fold)}
        del kept["removal"]["fold"]
        write_whole(out / FILE, json.dumps(kept, indent=1).encode())
        if removal.costs:
            write_whole(out / COSTS, costs_csv(removal).encode())
    return found


def longest(path: Path, model: Any, tokenizer: Any) -> int:
    """Return the most tokens of a text that a folder names for its model."""
    file = path / "sentence_bert_config.json"
    given = json.loads(file.read_text(encoding="utf8")) if file.is_file() else {}
    known = [given.get("max_seq_length"), tokenizer.model_max_length, _positions(model)]
    return given.get("max_seq_length") or min(each for each in [*known, LONGEST] if each)


def _positions(model: Any) -> int | None:
    """Return the most positions of a model, or None for one without a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"{path} holds no tokenizer; write it there with `tokenizer.save_pretrained`")
    return AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="right")


def _constant_first_token(model: Any, tokenizer: Any, texts: Texts, others: list[Texts]) -> str:
    """Keep the keys and values of a first token in the model, if first tokens are large; return what was done."""
    found = large_first_token(model, texts.of_length(texts.length, WINDOWS))
    if found is None:
        return ""
    named = [*texts.begin, tokenizer.bos_token_id, tokenizer.eos_token_id]
    token = next((each for each in named if each is not None), 0)
    keep_first_token(model, token)
    for each in (texts, *others):
        each.begin = []
    return (
        f" The first token of a text is up to {found.ratio:.0f} times as large as others, from {found.norm} on. So "
        f"{tokenizer.decode([token])!r} is now before every text, as constant keys and values: do not put it there."
    )


def _without_added_tokens(tokenizer: Any) -> Any:
    """Return a tokenizer that puts no tokens before or after a text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast  # others put them there again when they are loaded

    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    kept = {"model_max_length": tokenizer.model_max_length, "chat_template": tokenizer.chat_template}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **kept, **tokenizer.special_tokens_map)


def _kind(model: Any) -> str:
    """Return "causal" for a language model, "encoder" for one that returns vectors, or "head"."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and a decoder; use normkit.remove_norms with batches of both")
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "head" if "For" in name else "encoder"


def _example(model: Any, device: str) -> dict[str, Any]:
    found = example_for(model)
    return {key: each.to(device) if isinstance(each, Tensor) else each for key, each in found.items()}


def _pooling(path: Path) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the pooling of a sentence encoder: the first token if the folder says so, else the mean."""
    file = path / "1_Pooling" / "config.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf8")).get("pooling_mode_cls_token"):
        return lambda values, mask: values[:, 0]
    return pooled


def _next_tokens(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return loss and most likely next token at each position but the last, `[batch, time - 1]`."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.mT, batch["input_ids"][:, 1:], reduction="none"), logits.argmax(-1)


@torch.no_grad()
def _mean_loss(batches: Sequence[dict[str, Tensor]], model: nn.Module) -> float:
    return float(torch.cat([_next_tokens(model, batch)[0].flatten() for batch in batches]).double().mean())


@torch.no_grad()
def _rows(kind: str, model: Any, original: Any, texts: Texts, pool: Callable[..., Tensor]) -> list[dict[str, Any]]:
    """Measure at several lengths, or at several positions of a language model's text."""
    lengths = [*(n for n in LENGTHS if n < texts.length), texts.length]
    if kind == "causal":
        pairs = [[_next_tokens(each, b) for each in (original, model)] for b in texts.of_length(lengths[-1], WINDOWS)]
        before, mine = (torch.cat([pair[at][0] for pair in pairs]) for at in (0, 1))
        same = torch.cat([pair[0][1] == pair[1][1] for pair in pairs])
        parts = [("positions", f"{low} to {high}", slice(low, high)) for low, high in pairwise([0, *lengths])]
        parts = [("positions", "all", slice(None)), *(part for part in parts if before[:, part[2]].numel())]
        return [
            {name: which, "perplexity": float(mine[:, at].mean().exp()),
             "original": float(before[:, at].mean().exp()),
             "same next": f"{100 * float(same[:, at].double().mean()):.1f} %"} for name, which, at in parts
        ]  # fmt: skip
    rows = []
    for length in lengths:
        batches = texts.of_length(length, ITEMS)
        tokens = sum(int(mask.sum()) for batch in batches if (mask := mask_of(batch)) is not None) / ITEMS
        row: dict[str, Any] = {"tokens": round(tokens)}
        outputs = [[pick_output(each(**batch)).float() for each in (original, model)] for batch in batches]
        if kind == "head":
            theirs, mine = (torch.cat([out[at].flatten(0, -2) for out in outputs]) for at in (0, 1))
            distance = F.kl_div(mine.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none").sum(-1)
            same = (mine.argmax(-1) == theirs.argmax(-1)).double().mean()
            row |= {"divergence": float(distance.mean()), "same class": f"{100 * float(same):.1f} %"}
        else:
            theirs, mine = (
                F.normalize(torch.cat([pool(out[at], mask_of(b)) for out, b in zip(outputs, batches, strict=True)]))
                for at in (0, 1)
            )
            cosine, same = (mine * theirs).sum(1), (_nearest(mine) == _nearest(theirs)).double().mean()
            row |= {"cosine": float(cosine.mean()), "worst 1 %": float(cosine.quantile(0.01))}
            row["same nearest"] = f"{100 * float(same):.0f} %"
        rows.append(row)
    return rows


def _nearest(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)


@torch.no_grad()
def _continue(tokenizer: Any, original: Any, model: Any, texts: Texts) -> dict[str, str]:
    """Return a held-out text, and how both models continue it with their most likely tokens."""
    prompt = texts.of_length(PROMPT, 1)[0]["input_ids"]
    found = {"text": tokenizer.decode(prompt[0])}
    for name, each in (("continued by the original", original), ("continued without norms", model)):
        ids = prompt
        for _ in range(CONTINUED):
            ids = torch.cat([ids, each(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        found[name] = tokenizer.decode(ids[0, prompt.shape[1] :])
    return found


def _about(settings: Settings, length: int, removal: Removal) -> str:
    how = f"trained on {settings.text} in {removal.steps} steps" if removal.steps else f"fitted on {settings.text}"
    return f"The model was {how}, on texts of up to {length} tokens: do not expect this elsewhere."


def _load_lines(path: Path, out: Path) -> str:
    """Return two lines of Python that load the result."""
    if (path / "modules.json").is_file():
        return (
            "from sentence_transformers import SentenceTransformer\n"
            f'model = SentenceTransformer("{out}", trust_remote_code=True)  # runs {out}/load.py'
        )
    auto = next(iter(json.loads((out / "config.json").read_text(encoding="utf8")).get("auto_map", {})), None)
    if auto is None:
        return f'import normkit\nmodel = normkit.load_pretrained("{out}")'
    return (
        f"from transformers import {auto}\n"
        f'model = {auto}.from_pretrained("{out}", trust_remote_code=True)  # runs {out}/load.py'
    )


def costs_csv(removal: Removal) -> str:
    """Return the costs of norms by depth, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["depth", "norm", "block", "alone", "gone", "unit", "budget", "rise", "forwards"])
    for depth, cost in enumerate(removal.costs):
        gone = "yes" if cost.gone else "no"
        row = [depth, cost.norm, cost.block, f"{cost.alone:.6g}", gone, removal.unit, removal.budget]
        writer.writerow([*row, f"{removal.rise:.6g}", removal.forwards])
    return text.getvalue()


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else str(value)
