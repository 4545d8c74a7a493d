"""Released norms: fifty training steps against NumPy, authors' checkpoints, conversion."""

import formulas_released as formulas
import numpy as np
import pytest
import torch
from norm_cases import DIM, batch, train_step
from normkit_papers.released import RELEASED, Released
from test_formulas import STEPS, batches, fifty_steps
from torch.testing import assert_close

SETTINGS = [
    ("power", {"warmup": 20}),
    ("power", {"groups": 4, "warmup": 8, "alpha_fwd": 0.95}),
    ("power", {"groups": 2, "warmup": 0, "alpha_bkw": 0.95}),
    ("power", {"warmup": 1}),
    ("mabn", {"warmup": 20}),
    ("mabn", {"window": 4, "warmup": 0}),
    ("mabn", {"window": 1, "warmup": 5}),
    ("un", {"warmup": 20}),
    ("un", {"window": (3, 5), "warmup": 10}),
    ("un", {"warmup": 10, "outlier_filtration": True}),
    ("un", {"window": 1, "warmup": 10}),
    ("un", {"warmup": 2, "outlier_filtration": True}),
    ("batch", {}),
    ("batch", {"alpha": 0.9}),
]
LATE = 1008  # MABN and UN change once more after 1000 steps; whole turns of windows of 3 and 4
ids = [f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})" for name, given in SETTINGS]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "given"), SETTINGS, ids=ids)
def test_agrees_with_the_released_code_over_fifty_steps(name, given, padded):
    history = fifty_steps(RELEASED[name](DIM, **given).double(), formulas.MODELS[name](DIM, **given), padded)
    if given.get("outlier_filtration"):
        assert 0 < history[-1]["skip_counter"][0] < STEPS - given["warmup"]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "given"), [s for s in SETTINGS if s[0] in ("mabn", "un")])
def test_agrees_after_a_thousand_steps_too(name, given, padded):
    norm, model = RELEASED[name](DIM, **given).double(), formulas.MODELS[name](DIM, **given)
    norm.iters += LATE - 10
    model.t = LATE - 10
    fifty_steps(norm, model, padded)


def test_agrees_with_the_classification_code_past_its_hundredth_step():
    norm, model = RELEASED["mabn_cls"](DIM, window=4).double(), formulas.MABNPairs(DIM, window=4)
    random = np.random.default_rng(0)
    for _ in range(120):
        x, dy = random.normal(size=(2, 8, 5, DIM))
        x *= np.exp(0.5 * random.normal(size=(8, 1, DIM)))
        for p in norm.parameters():
            p.data.copy_(torch.from_numpy(random.normal(size=DIM) + 0.5))
        expected = model.step(x, dy, None, norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy())
        got = train_step(norm, torch.from_numpy(x), torch.from_numpy(dy))
        got["weight"], got["bias"] = got.pop("dweight"), got.pop("dbias")
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-10, atol=1e-10, err_msg=key)


# names and shapes in a checkpoint of one norm, from the authors' code
CHECKPOINTS = {
    "power": {"weight": (8,), "bias": (8,), "running_phi": (1, 8, 1, 1), "ema_gz": (1, 8, 1, 1), "iters": (1,)},
    "mabn": {
        "weight": (8,), "bias": (8,), "running_var": (1, 8, 1, 1), "iters": (1,), "buffer_x2": (16, 8),
        "buffer_gz": (16, 8),
    },
    "mabn_cls": {
        "weight": (8,), "bias": (8,), "running_var": (8,), "sta_matrix": (16, 32), "pre_x2": (16, 8),
        "pre_gz": (16, 8), "iters": (1,),
    },
    "un": {
        "weight": (8,), "bias": (8,), "running_var": (8,), "ema_gz": (8,), "iters": (1,), "buffer_x2": (4, 8),
        "buffer_gz": (4, 8), "skip_counter": (1,),
    },
    "batch": {
        "weight": (8,), "bias": (8,), "running_mean": (8,), "running_var": (8,), "num_batches_tracked": (),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_checkpoints_of_the_authors_load(name):
    norm = RELEASED[name](8)
    counters = {"num_batches_tracked", "skip_counter"} | ({"iters"} if name != "mabn_cls" else set())
    state = {
        key: torch.full(shape, 7) if key in counters else torch.rand(shape) for key, shape in CHECKPOINTS[name].items()
    }
    norm.load_state_dict(state, strict=True)
    assert_close(dict(norm.state_dict()), state)
    x = batch(0, 5, 8, dtype=torch.float32)
    running = state.get("running_phi", state.get("running_var")).flatten()
    mean = state.get("running_mean", torch.zeros(8))
    if name in ("power", "batch"):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = (x - mean) / (running + 1e-5).sqrt() * state["weight"] + state["bias"]
    assert_close(norm.eval()(batch(0, 5, 8, dtype=torch.float32)), expected)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("power", {"groups": 2, "warmup": 12}),
        ("mabn", {"window": 4, "warmup": 12}),
        ("un", {"warmup": 12}),
        ("un", {"warmup": 12, "window": (4, 3), "outlier_filtration": True}),
    ],
)
def test_modern_norms_continue_from_released_ones(name, given):
    """Without padding and dead channels, norms of NORMS with these options compute the same."""
    old, random = RELEASED[name](DIM, **given).double(), np.random.default_rng(0)
    for t, (x, dy, _) in enumerate(batches(padded=False)):
        if t == 8:
            new = old.modern()
            assert type(new).__name__ == type(old).__name__
        for p in old.parameters():
            p.data.copy_(torch.from_numpy(random.normal(size=DIM) + 0.5))
        if t == 25:  # as after a thousand steps
            old.iters += LATE
            new.step += LATE
        x[:] += float(t == 30)  # no channel is dead
        expected = train_step(old, torch.from_numpy(x), torch.from_numpy(dy))
        if t < 8:
            continue
        for p, q in zip(new.parameters(), old.parameters(), strict=True):
            p.data.copy_(q)
        got = train_step(new, torch.from_numpy(x), torch.from_numpy(dy))
        for key in ("y", "dx", "dweight", "dbias"):
            assert_close(got[key], expected[key], msg=lambda text, key=key, t=t: f"step {t} {key}: {text}")
        running = expected["running_phi"] if name == "power" else expected["running_var"]
        assert_close(got["running"].flatten(), running.flatten())
        if name == "power":  # Eq. 13 and the code's recursion are the same one, up to this factor
            assert_close(got["nu"].flatten(), (1 - old.alpha_bkw) * expected["ema_gz"].flatten())
        if "psi" in got:
            assert_close(got["psi"].flatten(), expected["ema_gz"])
    if name == "un" and "outlier_filtration" in given:
        assert int(new.filtered) == int(old.skip_counter) > 0


@pytest.mark.parametrize("name", RELEASED)
def test_released_norms_are_norms(name):
    norm: Released = RELEASED[name](DIM, eps=1e-4).double()
    shape = (32, 3, DIM)
    fresh = {key: value.clone() for key, value in norm.state_dict().items()}
    for i in range(3):
        train_step(norm, batch(i, *shape), batch(9 + i, *shape))
    with torch.no_grad():
        norm.weight.copy_(batch(20, DIM))
    x = batch(30, *shape)
    norm.eval()
    rest, scale, shift = norm.split()
    assert_close(rest(x) * scale + shift, norm(x))
    assert norm.spec.startswith(f"released.{name}(eps=0.0001")
    assert norm.spec in repr(norm)
    norm.reset_parameters()
    assert_close(dict(norm.state_dict()), fresh)


def test_bad_options_raise_with_what_is_allowed():
    for make, message in [
        (lambda: RELEASED["power"](8, groups=3), "divisor"),
        (lambda: RELEASED["un"](8, window=(1, 2, 3)), "two"),
        (lambda: RELEASED["mabn"](8, alpha=1.0), "< 1"),
        (lambda: RELEASED["mabn_cls"](8, window=2)(torch.zeros(3, 8)), r"x\[4"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
