"""Fifty training steps of every norm against formulas.py: outputs, gradients, buffers."""

import inspect

import formulas
import numpy as np
import pytest
import torch
from norm_cases import DIM, short
from torch.nn.functional import linear

from normkit.norms import NORMS, fix_embedding, make, options, parse

STEPS = 50
PAPER = [  # the papers' settings, with warm-ups that end within fifty steps
    "layer", "rms", "rms(eps_at='outside', eps=1e-8)", "group", "group(groups=2)", "group(groups=1)",
    "group(groups=4, over='sample')", "instance",
    "scale", "scale(learn=False)", "scale(eps=1.0)", "nonorm", "dyt", "derf",
    "batch", "batch(alpha=0.95, running_var='biased')", "repbn",
    "renorm(warmup=12, r_until=40, d_until=25)", "renorm(warmup=3, r_until=10, d_until=10, r_max=1.2, d_max=0.2)",
    "pnv", "pnv(alpha=0.95)",
    "mabn(warmup=20)", "mabn(window=4, warmup=12, renorm_after=20)",
    "mabn(window=4, renorm_after=8, warmup=9, r_max=1.1)",
    "mabn(window=1, warmup=4)",
    "un(warmup=20)", "un(warmup=20, outlier_filtration=True)", "un(warmup=12, window=3, window_bkw=6)",
    "un(warmup=0, window=5, window_bkw=2)", "un(warmup=12, outlier_filtration=True, threshold='channel')",
    "un(warmup=12, alpha_bkw=0.0)", "un(window=1, warmup=12)",
]  # fmt: skip
PAPER += [f"power(groups={groups}, warmup=20)" for groups in (0, 1, 2)]
PAPER += ["power(groups=0, warmup=15, alpha_fwd=0.95)"]
PAPER += [
    "power(groups=0, warmup=0)",
    "power(groups=0, warmup=1)",
    "power(groups=0, warmup=5, alpha_bkw=0.5, clamp=True)",
]
RELEASED = [  # the authors' code; that of MABN is the paper's
    "power(warmup=20)", "power(groups=4, warmup=8, alpha_fwd=0.95)", "power(groups=2, warmup=0, alpha_bkw=0.95)",
    "power(warmup=1)", "un(warmup=20)", "un(window=3, window_bkw=5, warmup=10)",
    "un(warmup=10, outlier_filtration=True)",
]  # fmt: skip
PAPER += [short(name) for name in NORMS if name not in {parse(spec)[0] for spec in PAPER}]


def batches(padded: bool, seed: int = 0, dead: bool = True):
    """Fifty batches whose sizes jump now and then; padded rows carry content and gradient."""
    random = np.random.default_rng(seed)
    for t in range(STEPS):
        x = random.normal(0.2, 1, (3, 5, DIM)) * np.linspace(0.5, 2, DIM) * np.exp(0.2 * random.normal(size=DIM))
        x *= 1.0 if t % 11 else 3.0  # a fluctuation, for filters and clips
        x[:, 0] *= 1.0 if t % 7 else 0.05  # short rows, for ScaleNorm
        if t == 30 and dead:
            x[..., 2] = 0  # a dead channel
        dy = random.normal(size=x.shape)
        keep = np.ones((3, 5), bool)
        if padded:
            keep = np.arange(5) < random.integers(1, 6, size=(3, 1))
            x[~keep] = x[~keep] * 7 + 1
        yield x, dy, keep


def agree(name: str, t: int, got: torch.Tensor | np.ndarray, expected: np.ndarray) -> None:
    expected = np.asarray(expected, float)
    size = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(
        np.asarray(got, float), expected, rtol=1e-10, atol=1e-10 * size, err_msg=f"{name}, step {t}"
    )


def fifty_steps(norm, model, padded: bool, dead: bool = True) -> list[dict]:
    """Run norm and model; draw new parameters before every step."""
    random = np.random.default_rng(1)
    history = []
    for t, (x, dy, keep) in enumerate(batches(padded, dead=dead), 1):
        for parameter in norm.parameters():
            value = random.normal(size=parameter.shape) + np.sign(random.normal(size=parameter.shape))
            parameter.data.copy_(torch.from_numpy(value))
        norm.zero_grad()
        given = {name: p.detach().numpy().copy() for name, p in norm.named_parameters()}
        leaf = torch.from_numpy(x).requires_grad_()
        y = norm(leaf, torch.from_numpy(keep) if padded else None)
        y.backward(torch.from_numpy(dy))
        expected = model.step(x, dy, keep, **given)
        got = {"y": y.detach(), "dx": leaf.grad, **dict(norm.named_buffers())}
        got |= {name: p.grad for name, p in norm.named_parameters() if p.requires_grad}
        assert got.keys() == expected.keys()
        for name in expected:
            agree(name, t, got[name], expected[name])
        history.append(expected)
    return history


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("spec", PAPER)
def test_agrees_with_the_formulas_over_fifty_steps(spec, padded):
    name, given = parse(spec)
    history = fifty_steps(make(spec, DIM).double(), formulas.model(name)(DIM, **given), padded)
    if given.get("outlier_filtration"):  # otherwise the test would not have seen both kinds of step
        late = STEPS - given["warmup"] + 1
        assert 0 < history[-1]["filtered"] < late + ("threshold" in given)  # one threshold a channel: nearly all steps


@pytest.mark.parametrize("late", [0, 980])  # UN's code changes once more after a thousand steps
@pytest.mark.parametrize("spec", RELEASED)
def test_agrees_with_the_released_code_over_fifty_steps(spec, late):
    name, given = parse(spec)
    norm, model = make(spec[:-1] + ", form='released')", DIM).double(), formulas.model(name, "released")(DIM, **given)
    norm.step += late
    model.t += late
    history = fifty_steps(norm, model, padded=False, dead=False)
    if given.get("outlier_filtration"):
        assert 0 < history[-1]["filtered"] < STEPS


@pytest.mark.parametrize("name", NORMS)
def test_defaults_are_those_of_the_papers_but_for_the_automatic_warmup(name):
    known = options(name)
    for option in list(inspect.signature(formulas.model(name).__init__).parameters.values())[2:]:
        ours = known[option.name]
        assert ours == option.default or (option.name, ours) == ("warmup", "auto"), option.name


def test_fixnorm_at_the_input_and_at_a_tied_output():
    random = np.random.default_rng(0)
    embedding = torch.nn.Embedding(7, DIM).double()
    fix_embedding(embedding)
    matrix = embedding.parametrizations.weight.original
    for t in range(STEPS):
        matrix.data.copy_(torch.from_numpy(random.normal(size=(7, DIM)) * 0.01))
        tokens, dy_in = random.integers(0, 7, 5), random.normal(size=(5, DIM))
        h, dy_out = random.normal(size=(4, DIM)), random.normal(size=(4, 7))
        leaf = torch.from_numpy(h).requires_grad_()
        x = embedding(torch.from_numpy(tokens)) * DIM**0.5
        logits = linear(leaf, embedding.weight)
        matrix.grad = None
        torch.autograd.backward([x, logits], [torch.from_numpy(dy_in), torch.from_numpy(dy_out)])
        expected = formulas.fixnorm(matrix.detach().numpy(), tokens, dy_in, h, dy_out)
        got = {"x": x.detach(), "logits": logits.detach(), "matrix": matrix.grad, "h": leaf.grad}
        for name in expected:
            agree(name, t, got[name], expected[name])
