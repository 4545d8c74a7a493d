"""Remove the norms of SmolLM2-135M by several ways, and keep one row of CSV each.

    python benchmarks/remove_norms_lm.py MODEL WIKITEXT fit --way pass --bound --first 12
    python benchmarks/remove_norms_lm.py MODEL WIKITEXT train --calm 2 --bound --first 10 --minutes 13
    python benchmarks/remove_norms_lm.py MODEL WIKITEXT blocks --calm 2 --bound --minutes 14 --state FOLDER
    python benchmarks/remove_norms_lm.py MODEL WIKITEXT time --sequences 32

MODEL is a folder with a Llama checkpoint, WIKITEXT one with `wiki.train.tokens.xz` and `wiki.valid.tokens.xz`. A norm
becomes `x * scale + shift`, constant per channel, which folds into the weights that read it. The first token is always
the same, so its keys and values are parameters, and its stream is not computed. Products run in bfloat16.
"""

import argparse
import copy
import functools
import lzma
import math
import sys
import time
from pathlib import Path

import rows
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit
from normkit.models.first_token import keep_first_token
from normkit.models.huggingface import import_transformers

LENGTH = 256  # tokens of a sequence, without the first token
SITES = ((1, "n1", "qkv", "mix", "o"), (2, "n2", "gate_up", "act", "add"))  # half of a block: norm, readers, writer
FIELDS = ["way", "norms_gone", "norms", "bound", "tokens_fitted", "steps", "seconds", "loss", "delta"]
FIELDS += ["evaluated_tokens", "command", "commit", "device", "note"]


class Line(nn.Module):
    """What stands in a norm's place; clamped to [low, high] if bounds are given."""

    def __init__(self, scale: Tensor, shift: Tensor, low: Tensor | None = None, high: Tensor | None = None):
        super().__init__()
        self.scale, self.shift = nn.Parameter(scale), nn.Parameter(shift)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addcmul(self.shift, x, self.scale)
        return y if self.low is None else torch.clamp(y, self.low, self.high)


class Block(nn.Module):
    """A block of Llama whose first token is a constant key and value."""

    def __init__(self, layer: nn.Module, key: Tensor, value: Tensor, theta: float):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.n1, self.n2 = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self.o, self.down = joined(attention.o_proj), joined(mlp.down_proj)
        self.key, self.value = nn.Parameter(key), nn.Parameter(value)  # [1, key heads, 1, width]
        self.width, self.theta = key.shape[-1], theta
        self.calm: tuple[Tensor, Tensor] | None = None  # bounds of what the MLP adds

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.o(self.mix(self.qkv(self.n1(h)))).to(h.dtype)
        return h + self.add(self.act(self.gate_up(self.n2(h)))).to(h.dtype)

    def add(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the stream."""
        y = self.down(x)
        return y if self.calm is None else y.clamp(*self.calm)

    def mix(self, qkv: Tensor) -> Tensor:
        """Attention of `[batch, time, channels]`, before its output projection."""
        length, heads = qkv.shape[1], self.key.shape[1]
        q, k, v = (x.unflatten(-1, (-1, self.width)).transpose(1, 2) for x in qkv.split(
            [qkv.shape[-1] - 2 * heads * self.width, heads * self.width, heads * self.width], -1))  # fmt: skip
        angle = torch.arange(1, length + 1)[:, None] * self.theta ** -(torch.arange(0, self.width, 2) / self.width)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (x * cos + torch.cat([-x[..., self.width // 2 :], x[..., : self.width // 2]], -1) * sin for x in (q, k))
        k, v = (torch.cat([a.expand(len(b), -1, -1, -1), b], 2) for a, b in ((self.key, k), (self.value, v)))
        seen = torch.ones(length, length + 1, dtype=torch.bool).tril(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def act(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class Model(nn.Module):
    """Llama with a constant first token."""

    def __init__(self, llama: nn.Module, first_token: int):
        super().__init__()
        cache = llama(torch.tensor([[first_token]]), use_cache=True).past_key_values.layers
        theta = llama.config.rope_parameters["rope_theta"]
        self.embed, self.norm = llama.model.embed_tokens, llama.model.norm
        self.blocks = nn.ModuleList(
            Block(b, c.keys, c.values, theta) for b, c in zip(llama.model.layers, cache, strict=True)
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def head(self, h: Tensor) -> Tensor:
        return F.linear(self.norm(h), self.embed.weight)


def joined(*layers: nn.Linear) -> nn.Linear:
    """Return one linear layer with a bias for several that read the same."""
    layer = nn.Linear(layers[0].in_features, sum(each.out_features for each in layers))
    layer.weight.data = torch.cat([each.weight.data for each in layers])
    layer.bias.data.zero_()
    return layer


def in_parts(function, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([function(part).float() for part in x.split(4)])


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def usual(x: Tensor) -> Tensor:
    """Return 1 for tokens below twice the median root mean square, else 0: `[batch, time]`."""
    return (rms(x) < 2 * rms(x).median()).float()


def states(model: Model, ids: Tensor) -> list[Tensor]:
    """Return the stream before each norm."""
    h, found = model.embed(ids), []
    for block in model.blocks:
        for _, norm, reader, middle, writer in SITES:
            found.append(h)
            h = h + in_parts(chain(block, norm, reader, middle, writer), h)
    return [*found, h]


def chain(block: Block, *names: str):
    """Return a function that calls parts of a block one after the other."""
    return lambda x: functools.reduce(lambda y, name: getattr(block, name)(y), names, x)


def line(x: Tensor, y: Tensor, weight: Tensor, bound: bool) -> Line:
    """Fit y = x * scale + shift in each channel by least squares; the bound is the range of y."""
    x, y, w = x.flatten(0, 1).double(), y.flatten(0, 1).double(), weight.flatten().double()[:, None] / weight.sum()
    mean_x, mean_y = (w * x).sum(0), (w * y).sum(0)
    scale = (w * (x - mean_x) * (y - mean_y)).sum(0) / (w * (x - mean_x) ** 2).sum(0)
    kept = y[w[:, 0] > 0].float()
    return Line(scale.float(), (mean_y - scale * mean_x).float(), *((kept.amin(0), kept.amax(0)) if bound else ()))


@torch.no_grad()
def fit(original: Model, known: list[Tensor], first: int, way: str, bound: bool) -> Model:
    """Replace norms by lines, block by block, on cached states of the original.

    Ways: `pass` fits each norm on the original's states, `gains` on those of the new model.
    """
    model, h = copy.deepcopy(original), known[0]
    for number, (block, theirs) in enumerate(zip(model.blocks, original.blocks, strict=True)):
        for k, norm, *rest in SITES:
            x, after = known[2 * number + k - 1], known[2 * number + k]
            if number < first:
                h = after
                continue
            y, mine = getattr(theirs, norm)(x), x if way == "pass" else h
            setattr(block, norm, line(mine, y, usual(x) * usual(mine), bound))
            h = h + in_parts(chain(block, norm, *rest), h)
    mine = known[-1] if way == "pass" else h
    model.norm = line(mine, original.norm(known[-1]), usual(known[-1]) * usual(mine), False)
    return model


@torch.no_grad()
def calm(model: Model, layers: list[int], known: list[Tensor]) -> Model:
    """Clamp what MLPs add to the range of tokens that stay usual, so that no token becomes large."""
    model = copy.deepcopy(model)
    for number in layers:
        block, x = model.blocks[number], known[2 * number + 1]
        added = in_parts(chain(block, *SITES[1][1:]), x)[usual(known[2 * number + 2]).bool()]
        block.calm = added.amin(0), added.amax(0)
    return model


def read_weights(original: Model, number: int) -> Tensor:
    """Return the mean weight `[channels]` with which the norms after a block read squares of the stream."""
    gains = [norm.weight for block in original.blocks[number + 1 :] for norm in (block.n1, block.n2)]
    squares = [gain.square() / gain.square().mean() for gain in (*gains, original.norm.weight)]
    return torch.stack(squares).mean(0)


def relative_error(h: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Return the squared error of each token, relative to its square."""
    return (weights * (h - x).square()).sum(-1) / (weights * x.square()).sum(-1)


def new_lines(model: Model, first: int) -> None:
    """Put lines of any value in the place of norms, to load others into."""
    dim = len(model.norm.weight)
    for block in model.blocks[first:]:
        block.n1, block.n2 = (Line(*torch.zeros(4, dim).unbind()) for _ in range(2))
    model.norm = Line(*torch.zeros(2, dim).unbind())


def train_blocks(original: Model, model: Model, data: Tensor, first: int, state: Path, lr: float, epochs: int) -> None:
    """Replace the norms of each block by lines and train it towards the original's stream, first to last.

    A block reads what the blocks before it, already trained, return. `model` has norms; it changes in place, and is
    kept in a file after each block.
    """
    file, done, start = state / "blocks.pt", first, time.time()
    if file.exists():
        new_lines(model, first)
        kept = torch.load(file, weights_only=True)
        done = kept["done"]
        model.load_state_dict(kept["model"], strict=False)
    with torch.no_grad():
        x = h = original.embed(data)
    for number, (theirs, block) in enumerate(zip(original.blocks, model.blocks, strict=True)):
        with torch.no_grad():
            wanted = in_parts(theirs, x)
        if number >= done:
            everywhere, weights = torch.ones(h.shape[:2]), read_weights(original, number)
            with torch.no_grad():
                block.n1 = line(h, theirs.n1(x), everywhere, True)
                y, mine = (each + in_parts(chain(b, *SITES[0][1:]), each) for b, each in ((theirs, x), (block, h)))
                block.n2 = line(mine, theirs.n2(y), everywhere, True)
                fitted = float(relative_error(in_parts(block, h), wanted, weights).mean())
            parameters = [each.requires_grad_(True) for each in block.parameters()]
            optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0, fused=True)
            steps = epochs * len(data) // 4
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 8) * (1 - step / steps)
                at = torch.randint(len(data), (4,))
                with torch.autocast("cpu", torch.bfloat16):
                    y = block(h[at])
                value = relative_error(y, wanted[at], weights).log1p().mean()
                optimizer.zero_grad()
                value.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            block.requires_grad_(False)
        with torch.no_grad():
            h, x = in_parts(block, h), wanted
            if number >= done:
                trained = float(relative_error(h, x, weights).mean())
                tell(f"block {number}: error {fitted:.4f} fitted, {trained:.4f} trained, {time.time() - start:.0f} s")
                torch.save({"done": number + 1, "model": model.state_dict()}, state / "new")
                (state / "new").replace(file)
    with torch.no_grad():
        model.norm = line(h, original.norm(x), torch.ones(h.shape[:2]), False)


@torch.no_grad()
def fold(model: Model, ids: Tensor) -> tuple[Model, float]:
    """Fold all lines into the layers that read them; also return the largest error in float64, relative.

    What is left in a line's place clamps the stream, where the line had bounds.
    """
    model = copy.deepcopy(model).double()
    folded = copy.deepcopy(model)
    for block in folded.blocks:
        for _, norm, reader, *_ in SITES:
            line, layer = getattr(block, norm), getattr(block, reader)
            ends = torch.stack([(end - line.shift) / line.scale for end in (line.low, line.high)])
            layer.bias += layer.weight @ line.shift
            layer.weight *= line.scale
            one, zero = torch.ones_like(line.scale), torch.zeros_like(line.scale)
            setattr(block, norm, Line(one, zero, ends.amin(0), ends.amax(0)))
    weight = model.embed.weight
    folded.norm, folded.out = nn.Identity(), nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
    folded.out.weight.copy_(weight * model.norm.scale)
    folded.out.bias.copy_(weight @ model.norm.shift)
    folded.head = folded.out.forward
    mine, theirs = folded(ids), model(ids)
    return folded, float((mine - theirs).abs().max() / theirs.abs().max())


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(
    original: Model,
    model: Model,
    data: Tensor,
    first: int,
    minutes: float,
    lr: float,
    state: Path | None,
    valid: Tensor,
) -> int:
    """Train towards the stream of the original after each block and its outputs; return the number of steps."""
    model.requires_grad_(False).norm.requires_grad_(True)
    model.blocks[first:].requires_grad_(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0, fused=True)
    start, done = time.time(), 0
    weights = [read_weights(original, number) for number in range(len(original.blocks))]
    if state is not None and (file := state / "train.pt").exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done, start = kept["done"], start - kept["seconds"]
    for ids in data[4 * done :].split(4):
        share = max(4 * done / len(data), (time.time() - start) / (60 * minutes))
        if share >= 1:
            break
        optimizer.param_groups[0]["lr"] = min(1, (done + 1) / 8) * (1 - share) * lr
        x = h = model.embed(ids)
        total = torch.zeros(())
        for number, (theirs, block) in enumerate(zip(original.blocks, model.blocks, strict=True)):
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    x = theirs(x)
                if number < first:  # not changed
                    h = x
                    continue
                h = block(h)
            total = total + (usual(x) * relative_error(h, x, weights[number]).log1p()).mean()
        some = torch.randperm(ids.numel())[:256]  # the output's product is the largest
        with torch.autocast("cpu", torch.bfloat16):
            wanted, found = original.head(x.flatten(0, 1)[some]).float(), model.head(h.flatten(0, 1)[some]).float()
        outputs = F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        (total + outputs).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        done += 1
        if done % 5 == 0:
            tell(f"step {done}: stream {float(total):.3f}, outputs {float(outputs):.4f}, {time.time() - start:.0f} s")
        if done % 25 == 0:
            tell(f"step {done}: validation loss {loss(model, valid):.4f}")
            if state is not None:
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                torch.save({**kept, "seconds": time.time() - start}, state / "new")
                (state / "new").replace(state / "train.pt")
    return done


@torch.no_grad()
def loss(model: Model, ids: Tensor, h: Tensor | None = None, start: int = 0) -> float:
    """Return the loss in nats per token, from the states `h` that enter block `start`."""
    total = 0.0
    for part, x in zip(ids.split(4), (model.embed(ids) if h is None else h).split(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            last = functools.reduce(lambda y, block: block(y), model.blocks[start:], x)
            logits = model.head(last)[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    total /= ids[:, 1:].numel()
    return total if math.isfinite(total) else math.inf


def time_of_fit(llama: nn.Module, ids: Tensor) -> float:
    """Return the seconds in which the library fits all norms of the model to the originals."""
    keep_first_token(llama, 0)
    batches = [{"input_ids": part, "use_cache": False, "logits_to_keep": 1} for part in ids.split(4)]
    converted, start = normkit.convert(llama, "un(warmup=0)").eval(), time.time()
    normkit.calibrate(converted, batches, like=llama, inplace=True)
    return time.time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("model")
    add("wikitext", type=Path)
    add("task", choices=["fit", "train", "blocks", "time"])
    add("--way", choices=["pass", "gains"], default="gains")
    add("--first", type=int, default=0, help="norms of this layer and all after it go, and the final norm")
    add("--bound", action="store_true", help="clamp what stands in a norm's place")
    add("--calm", type=int, nargs="*", default=[], help="layers whose MLP is clamped, so that no token becomes large")
    add("--sequences", type=int, default=16, help="to fit on, of 256 tokens")
    add("--epochs", type=int, default=2, help="of training a block alone")
    add("--lr", type=float, default=4e-4)
    add("--minutes", type=float, default=13)
    add("--steps", type=int, default=160)
    add("--state", type=Path, help="folder to continue from")
    add("--out", type=Path, default=Path("papers/results/remove-norms-lm.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers = import_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    llama = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def tokens(split: str, number: int) -> Tensor:
        with lzma.open(args.wikitext / f"wiki.{split}.tokens.xz", "rt", encoding="utf8", newline="\n") as file:
            ids = tokenizer(file.read(number * LENGTH * 8), add_special_tokens=False)["input_ids"]
        return torch.tensor(ids[: number * LENGTH]).view(number, LENGTH)

    if args.task == "time":
        print(f"{time_of_fit(llama, tokens('train', args.sequences)):.1f} s")
        return
    with torch.no_grad():
        original = Model(llama, 0).requires_grad_(False)
    valid = tokens("valid", 8)
    base, start = loss(original, valid), time.time()
    words = [w for w, before in zip(sys.argv[3:], sys.argv[2:], strict=False) if not {w, before} & {"--state", "--out"}]
    command = "python benchmarks/remove_norms_lm.py MODEL WIKITEXT " + " ".join(words)
    about = {"bound": args.bound, "tokens_fitted": args.sequences * LENGTH, "evaluated_tokens": valid[:, 1:].numel()}
    about |= {"command": command, "commit": rows.commit(), "device": "Xeon with AMX, 1 thread, shared", "note": ""}

    def row(way: str, gone: int, norms: str, steps: int, value: float) -> None:
        way += f", MLP of layers {args.calm} clamped" if args.calm else ""
        values = {"steps": steps, "seconds": round(time.time() - start), "loss": f"{value:.4f}"}
        made = {"way": way, "norms_gone": gone, "norms": norms, **values, "delta": f"{value - base:.4f}", **about}
        tell(f"{way}: {gone} gone, {steps} steps, loss {value:.4f}")
        rows.keep(args.out, FIELDS, ("way", "norms_gone", "norms", "bound", "steps", "command"), [made])

    way, first = args.way, args.first
    gone, norms = 2 * (len(original.blocks) - first) + 1, f"layers {first} to {len(original.blocks) - 1} and final"
    data = tokens("train", args.sequences + 4 * args.steps)
    fitted, data = data[: args.sequences], data[args.sequences :]
    teacher = original
    if args.task != "blocks" or args.calm:
        known = states(original, fitted[:16] if args.task == "blocks" else fitted)
    if args.calm:
        teacher = calm(original, args.calm, known)
        row("original", 0, "none", 0, loss(teacher, valid))
        known = [] if args.task == "blocks" else states(teacher, fitted)
    if args.task == "blocks":
        way, model = "blocks", copy.deepcopy(teacher)
        args.state.mkdir(parents=True, exist_ok=True)
        train_blocks(teacher, model, fitted, first, args.state, 1e-3, args.epochs)
        row("blocks", gone, norms, args.epochs * len(fitted) // 4, loss(model, valid))
    else:
        model = fit(teacher, known, first, way, args.bound)
    if args.task != "blocks":
        row(way, gone, norms, 0, loss(model, valid))
    if args.task != "fit":
        steps = train(original, model, data, first, args.minutes, args.lr, args.state, valid)
        row(f"{way}, trained", gone, norms, steps, loss(model, valid))
    if args.task == "blocks" and not first:
        folded, error = fold(model, valid[:1])
        lines = [module for module in folded.modules() if "Norm" in type(module).__name__]
        tell(f"folded: {len(lines)} norms left, largest error {error:.1e} in float64")


if __name__ == "__main__":
    main()
