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
from normkit.fold.folders import example_for
from normkit.models import load_pretrained, save_pretrained
from normkit.models.first_token import Clamp, keep_first_token
from normkit.models.huggingface import copy_small_files
from normkit.removal.distill import Comparison, mask_of
from normkit.removal.large_tokens import large_first_token
from normkit.removal.remove import Removal, remove_norms
from normkit.removal.state import check_out, claimed
from normkit.removal.texts import SHORTEST, Texts, read_text, split

LONGEST = 512  # tokens of a text by default, where the model takes more
LENGTHS = (16, 64, 256, 1024)  # tokens at which the report measures, up to the longest text
SHORT = 4  # of the shortest texts, which are least alike
ITEMS = 128  # texts at each length
WINDOWS, SCORED = 4, 32  # texts to score on, for language models and others
PROMPT, CONTINUED = 16, 24  # tokens
BUDGET = 0.1  # nats, of a language model by default
FILE, COSTS = "removal.json", "costs.csv"
WIDTH = 118  # characters of a line


@dataclass(frozen=True)
class Settings:
    """Settings of `remove_norms_dir`. A language model without steps and budget gets a budget of 0.1 nats."""

    text: str  # to train on: a file with one text a line, or a data set of the Hub
    second: str | None = None  # another such text, which is measured on alone
    steps: int | None = (
        None  # of training, of each block of a language model, after which no norm is left; None for 300
    )
    budget: float | None = None  # largest rise of loss or cosine distance, without training; None to train
    length: int | None = None  # most tokens of a text; None for the model's, at most 512
    lr: float | None = None  # highest; None for that of `remove_norms`
    multiply_adds: bool = False  # leave each norm as one multiply-add, for float16 and 8-bit integers
    device: str = "cpu"  # or "cuda"
    seed: int = 0  # of the order of texts


@dataclass(frozen=True)
class DirRemoval:
    """Result of `remove_norms_dir`; prints with tables."""

    removal: Removal
    rows: list[dict[str, Any]]  # scores by text and length
    about: str  # what was trained on, and what not to expect
    samples: dict[str, str]  # a text, and how both models continue it, for language models
    load: str  # two lines that load the model

    def __str__(self) -> str:
        table = [[*self.rows[0]], *([_text(value) for value in row.values()] for row in self.rows)]
        samples = "\n".join(f"{name}: {text!r}" for name, text in self.samples.items())
        table = align(table, right=range(1, len(table[0])), heads=1)
        text = "\n\n".join(filter(None, [str(self.removal), table, samples, self.about]))
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
    if settings.budget is not None and settings.steps is not None:
        raise ValueError("--budget trains nothing; leave out --steps, or --budget")
    model = load_pretrained(path)
    if (path / "modules.json").is_file():
        model = _without_head(model)
    dtype = next(model.parameters()).dtype
    model = model.float().to(settings.device)
    tokenizer = _tokenizer(path)
    kind = _kind(model)
    length = settings.length or min(longest(path, model, tokenizer), LONGEST)
    if settings.length is not None:
        most = min(_positions(model) or length, tokenizer.model_max_length)
        require(SHORTEST <= length <= most, "--length", length, f"from {SHORTEST} to {most} tokens")
    lines, held_out = split(read_text(settings.text))
    shown = length if kind == "causal" else max(length, min(longest(path, model, tokenizer), LONGEST))
    make = functools.partial(Texts, tokenizer=tokenizer, length=shown, causal=kind == "causal", device=settings.device)
    texts = make(lines, name=f"--text {settings.text}", length=length)
    others = {"held out": make(held_out, name=f"the tenth of --text {settings.text} that is held out")}
    if settings.second is not None:
        others["second text"] = make(read_text(settings.second, "--second"), name=f"--second {settings.second}")
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
            fold=lambda trained: fold(
                trained, **_example(trained, settings.device), multiply_adds=settings.multiply_adds
            ),
            seed=settings.seed, checkpoint=checkpoint, on_progress=on_progress,
        )  # fmt: skip
        folded = folded.to(dtype)
        save_pretrained(folded, out)
        copy_small_files(path, out)
        if first and texts.added:
            _without_added_tokens(tokenizer).save_pretrained(out)
        rows = [{"text": name, **row} for name, other in others.items() for row in _rows(kind, folded, model, other)]
        samples = _continue(tokenizer, model, folded, others["held out"]) if kind == "causal" else {}
        clamped = any(isinstance(module, Clamp) for module in folded.modules())
        about = _about(settings, length, removal) + first
        about += " In the place of a norm that went, a clamp of its input stays." if clamped else ""
        found = DirRemoval(removal, rows, about, samples, _load_lines(path, out))
        kept = {"settings": dataclasses.asdict(settings), **dataclasses.asdict(found), "fold": str(removal.fold)}
        del kept["removal"]["fold"]
        write_whole(out / FILE, json.dumps(kept, indent=1).encode())
        if removal.costs:
            write_whole(out / COSTS, costs_csv(removal).encode())
    return found


def _without_head(model: Any) -> Any:
    """Return the model without its head, as sentence-transformers opens it; a pooler may be new."""
    base = model.base_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, module in type(base)(base.config).named_children() if base is not model else ():
            if getattr(base, name, None) is None:
                setattr(base, name, module)
    return base.eval()


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
    """Keep keys and values of a first token if first tokens are large; return what was done."""
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


def _next_tokens(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return loss and most likely next token at each position but the last, `[batch, time - 1]`."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.mT, batch["input_ids"][:, 1:], reduction="none"), logits.argmax(-1)


@torch.no_grad()
def _mean_loss(batches: Sequence[dict[str, Tensor]], model: nn.Module) -> float:
    return float(torch.cat([_next_tokens(model, batch)[0].flatten() for batch in batches]).double().mean())


@torch.no_grad()
def _rows(kind: str, model: Any, original: Any, texts: Texts) -> list[dict[str, Any]]:
    """Compare at several lengths, or at several positions of a language model's text."""
    lengths = [*(n for n in LENGTHS if n < texts.length), texts.length]
    if kind != "causal":
        compare, rows = Comparison(original, None, kind == "head", None), []
        for batches in (texts.of_length(length, ITEMS) for length in (SHORT, *lengths)):
            tokens = sum(int(mask.sum()) for batch in batches if (mask := mask_of(batch)) is not None) / ITEMS
            each = compare.distances(model, batches).double()
            mean, most = float(each.mean()), float(each.max())
            likeness = {"divergence, nats": mean} if kind == "head" else {"cosine": 1 - mean, "least cosine": 1 - most}
            rows.append({"tokens": round(tokens), **likeness})
        return rows
    pairs = [[_next_tokens(each, b) for each in (original, model)] for b in texts.of_length(lengths[-1], WINDOWS)]
    before, mine = (torch.cat([pair[at][0] for pair in pairs]) for at in (0, 1))
    same = torch.cat([pair[0][1] == pair[1][1] for pair in pairs])
    parts = [("all", slice(None)), *((f"{low} to {high}", slice(low, high)) for low, high in pairwise([0, *lengths]))]
    return [
        {"positions": which, "perplexity": float(mine[:, at].mean().exp()),
         "original": float(before[:, at].mean().exp()), "same next": float(same[:, at].double().mean())}
        for which, at in parts if before[:, at].numel()
    ]  # fmt: skip


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
            "from sentence_transformers import SentenceTransformer  # pip install sentence-transformers\n"
            f'model = SentenceTransformer("{out}", trust_remote_code=True)  # runs {out}/load.py\n'
            "# or, without its pooling, transformers.AutoModel.from_pretrained with the same arguments"
        )
    autos = json.loads((out / "config.json").read_text(encoding="utf8")).get("auto_map", {})
    auto = "AutoModelForCausalLM" if "AutoModelForCausalLM" in autos else next(iter(autos), None)
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
