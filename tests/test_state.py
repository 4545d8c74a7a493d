"""Laws of state: running statistics, windows, counters, and the end of the warm-up."""

import copy
import math

import pytest
import torch
from norm_cases import DIM, SPECS, STAT_SPECS, batch, random_norm, train_step, trained
from small_models import built
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.norms import make

every = pytest.mark.parametrize("spec", SPECS)
every_stat = pytest.mark.parametrize("spec", STAT_SPECS)


@every_stat
@pytest.mark.parametrize("detach", [True, False])
def test_a_norm_without_a_graph_is_recomputed_as_it_was(spec, detach):
    """It is frozen, as beside adapters, or the block detaches its output."""

    def forward(m, x):
        y = m.norm(x)
        return m.linear(y.detach() if detach else y)

    block = built(forward, norm=make(spec, DIM).requires_grad_(detach), linear=nn.Linear(DIM, DIM).double())
    with torch.no_grad():
        block(100 * batch(1, 8, DIM))  # a training forward that no backward pass needs
    plain = copy.deepcopy(block)
    for seed in (2, 3):
        x = batch(seed, 8, DIM, scale=seed)
        block.zero_grad()
        plain.zero_grad()
        plain(x).square().sum().backward()
        checkpoint(block, x, use_reentrant=False).square().sum().backward()
        assert_close(block.linear.weight.grad, plain.linear.weight.grad)
        assert_close(block.norm.state_dict(), plain.norm.state_dict())


@every_stat
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_batch_that_passes_twice_is_recomputed_each_time_as_it_was(spec, reentrant):
    """As with R-Drop; a batch with NaN passes, too."""
    plain, rerun = trained(spec), trained(spec)
    for seed in range(4):
        x, bad, weights = batch(seed, 8, DIM, scale=1 + seed), batch(9, 8, DIM), batch(20 + seed, 3, 8, DIM)
        bad[0] = torch.nan
        grads = []
        for norm in (plain, rerun):
            run = norm if norm is plain else (lambda x: checkpoint(rerun, x, use_reentrant=reentrant))
            leaf, other = x.clone().requires_grad_(), (2 * x + 1).requires_grad_()
            outputs = [run(leaf), run(bad.clone().requires_grad_()), run(leaf), run(other)]
            torch.autograd.backward([outputs[i] for i in (0, 2, 3)], list(weights))
            grads += [leaf.grad, other.grad]
        assert_close(grads[:2], grads[2:])
        assert_close(plain.state_dict(), rerun.state_dict())


def test_statistics_in_half_precision_are_refused():
    norm = normkit.make("un", DIM)
    norm.running.data = norm.running.data.bfloat16()  # as FSDP1 does
    with pytest.raises(TypeError, match="buffer_dtype=None"):
        norm(torch.randn(6, DIM))


def test_a_state_without_this_norm_leaves_it_alone():
    model = nn.ModuleDict({"norm": trained("un(warmup=auto)"), "head": nn.Linear(2, 2)})
    before = copy.deepcopy(model["norm"].state_dict())
    found = model.load_state_dict(model["head"].state_dict(prefix="head."), strict=False)
    assert_close(model["norm"].state_dict(), before)
    assert "norm.lag" in found.missing_keys


@pytest.mark.parametrize("spec", ["un(warmup=3)", "mabn(warmup=3)"])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_state_without_windows_starts_the_warm_up_again(spec, choice):
    saved, norm = make("pnv", DIM), make(spec, DIM)
    for i in range(30):
        saved(batch(i, 20, DIM, dtype=torch.float32))
    norm.load_state_dict(saved.state_dict(), strict=False)
    x = batch(30, 20, DIM, dtype=torch.float32)
    with normkit.kernels(choice):
        assert_close(norm(x), saved(x))  # empty windows made it up to 300 times as large
    assert norm.step == 1


def test_a_state_of_other_options_loads_into_a_norm_on_no_device():
    with torch.device("meta"):
        norm = make("un(warmup=auto)", DIM)
    norm.load_state_dict(make("un(warmup=100)", DIM).state_dict(), assign=True)
    assert norm(batch(0, 8, DIM)).isfinite().all()


@pytest.mark.parametrize("spec", ["un(window=2, warmup=2)", "layer"])
def test_recomputation_in_a_compiled_graph_agrees_or_raises(spec):
    """Activation checkpointing under torch.compile needs the statistics of the first forward."""

    def compiled(norm, **options):
        torch._dynamo.reset()
        return torch.compile(lambda x: checkpoint(norm, x, use_reentrant=False, **options), backend="aot_eager")

    def step(norm, call, i):
        norm.zero_grad()
        x = batch(i, 2, 4, DIM, dtype=torch.float32, scale=1 + i).requires_grad_()
        y = call(x)
        (y * batch(9, 2, 4, DIM, dtype=torch.float32)).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in norm.parameters()), *(b.clone() for b in norm.buffers())]

    eager = random_norm(spec, dtype=torch.float32)
    twin = copy.deepcopy(eager)
    call = compiled(twin, context_fn=normkit.keep_statistics)
    for i in range(5):
        assert_close(step(twin, call, i), step(eager, eager, i), rtol=2e-4, atol=2e-5)
    if not eager.batch_free:
        with pytest.raises(RuntimeError, match="keep_statistics"):
            step(twin, compiled(twin), 5)
        inner = torch.compile(twin, backend="aot_eager")  # recomputed in eager mode: its state would move twice
        with pytest.raises(RuntimeError):
            step(twin, lambda x: checkpoint(inner, x, use_reentrant=False, context_fn=normkit.keep_statistics), 6)


@every
def test_one_module_twice_in_one_graph(spec):
    x, dy = batch(0, 6, DIM), batch(1, 6, DIM)
    norm = trained(spec)
    first, second = x.clone().requires_grad_(), (2 * x + 1).clone().requires_grad_()
    (norm(first) * dy + norm(second) * dy).backward(torch.ones_like(dy))

    apart = trained(spec)  # the same two forwards, and backwards in the same order, as graphs of their own
    one, two = x.clone().requires_grad_(), (2 * x + 1).clone().requires_grad_()
    outputs = [apart(one), apart(two)]
    outputs[1].backward(dy)
    outputs[0].backward(dy)
    assert_close((first.grad, second.grad), (one.grad, two.grad))
    assert_close(dict(norm.named_buffers()), dict(apart.named_buffers()))
    if norm.exact_grad:  # then each use has the same gradient as alone
        alone = trained(spec)
        assert_close(first.grad, train_step(alone, x, dy)["dx"])
        assert_close(second.grad, train_step(alone, 2 * x + 1, dy)["dx"])


@every
def test_two_losses_of_one_output(spec):
    x, one, two = batch(0, 6, DIM), batch(1, 6, DIM), batch(2, 6, DIM)
    norm, other = trained(spec), trained(spec)
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    (y * one).sum().backward(retain_graph=True)
    (y * two).sum().backward()
    if norm.exact_grad:
        assert_close(leaf.grad, train_step(other, x, one + two)["dx"])
    assert leaf.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize("spec", ["power(groups=0, warmup=0)", "un(outlier_filtration=True, window=2, warmup=2)"])
def test_two_compiled_forwards_before_one_backward(spec):
    """State is read in the backward that changes it, not in the forward before."""
    eager = make(spec, 2)
    norm = copy.deepcopy(eager)
    compiled = torch.compile(norm, backend="aot_eager_decomp_partition")
    for _ in range(4):
        a, b = torch.randn(2, 6, 2)
        for forward in (eager, compiled):
            (forward(a).square().sum() + 3 * forward(b).square().sum()).backward()
    assert_close(dict(norm.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_state_is_float32_or_wider_whatever_the_default_type(spec, dtype):
    torch.set_default_dtype(dtype)
    try:
        norm = make(spec, DIM)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in norm.parameters()} <= {dtype}
    state = {b.dtype for b in norm.buffers() if b.is_floating_point()}
    assert state <= {torch.promote_types(dtype, torch.float32)}
    cast = trained(spec, dtype=torch.float32)
    before = {name: buffer.clone() for name, buffer in cast.named_buffers()}
    assert_close(dict(cast.to(dtype).named_buffers()), before, rtol=0, atol=0, check_dtype=dtype is not torch.float64)
    twin = make(spec, DIM).to(dtype)
    x, dy = batch(0, 6, DIM, dtype=dtype), batch(1, 6, DIM, dtype=dtype)
    after = train_step(norm, x, dy)
    assert_close(after, train_step(twin, x, dy), rtol=1e-6, atol=1e-6)  # sqrt(dim) of ScaleNorm
    assert after["y"].dtype is after["dx"].dtype is dtype


@every_stat
def test_reset_warmup_starts_again_and_keeps_running(spec):
    norm = trained(spec)
    running = norm.running.clone()
    norm.reset_warmup()
    assert int(norm.step) == 0
    assert_close(norm.running, running)
    assert all(int((b != 0).sum()) == 0 for n, b in norm.named_buffers() if n != "running")


@every_stat
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_state_given_by_functional_call_moves_in_the_backward_pass_too(spec, choice):
    norm, other = random_norm(spec), trained(spec, steps=5)
    before = copy.deepcopy(norm.state_dict())
    given = {**dict(norm.named_parameters()), **{name: b.clone() for name, b in other.named_buffers()}}
    x, dy = batch(7, 6, DIM), batch(8, 6, DIM)
    with normkit.kernels(choice):
        found = train_step(norm, x, dy, call=lambda *args: torch.func.functional_call(norm, given, args))
        expected = train_step(other, x, dy)
    assert_close({k: found[k] for k in ("y", "dx")}, {k: expected[k] for k in ("y", "dx")})
    assert_close({k: given[k] for k, _ in other.named_buffers()}, dict(other.named_buffers()))
    assert_close(norm.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_what_changes_between_steps_holds_in_the_next(choice):
    norm, x = make("un(warmup=9)", DIM), batch(1, 8, DIM).float()
    square = x.square().flatten(0, -2).mean(0)
    with normkit.kernels(choice):
        norm(x)
        assert_close(norm.running[0], 0.9 + 0.1 * square)
        norm.alpha = 0.5  # an option
        norm(x)
        assert_close(norm.running[0], 0.45 + 0.55 * square)
        norm.load_state_dict(make("un(warmup=9)", DIM).state_dict(), assign=True)  # other buffers
        norm(x)
        assert_close(norm.running[0], 0.5 + 0.5 * square)
        norm.track_running_stats = False
        norm(x)
        assert norm.step == 1
        norm.track_running_stats = True
        given = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        torch.func.functional_call(norm, given, x)
        assert (norm.step, given["step"]) == (1, 2)
        twin = copy.deepcopy(norm)
        twin(x)
        assert (norm.step, twin.step) == (1, 2)


@pytest.mark.parametrize("spec", ["un(warmup=2, window=2)", "mabn(warmup=2, window=2)"])
def test_forwards_without_a_backward_leave_no_gap_in_the_gradient_window(spec):
    """A GAN's generator also runs for the discriminator's step."""
    norm = trained(spec)
    norm.reset_warmup()
    for step in range(4):
        norm(batch(step, 6, DIM))
        train_step(norm, batch(step, 6, DIM), batch(9 + step, 6, DIM))
    assert norm.window_g.count_nonzero() == norm.window_g.numel()


@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore::torch.jit.TracerWarning")
@every_stat
def test_training_graphs_without_a_backward_pass_are_refused(spec):
    norm, x = random_norm(spec), batch(0, 6, DIM)
    for trace in (torch.export.export, torch.jit.trace):
        with pytest.raises(RuntimeError, match="eval"):
            trace(norm, (x,))


@every_stat
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_or_gradient_that_is_not_finite_leaves_the_state_alone(spec, bad):
    norm = trained(spec)
    before = copy.deepcopy(norm.state_dict())
    x = batch(0, 6, DIM)
    x[2, 3] = bad
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    y.backward(batch(1, 6, DIM))
    assert int(norm.skipped) == 1
    assert not y[2].isfinite().all()  # the output shows it
    assert y[[0, 1, 3, 4, 5]].isfinite().all()
    assert (y[0] != 0).any()
    after = norm.state_dict()
    for name in before:
        if not name.startswith("skipped"):
            assert_close(after[name], before[name], rtol=0, atol=0)
    dy = batch(1, 6, DIM)
    dy[1, 1] = bad
    after = train_step(norm, batch(0, 6, DIM), dy)
    assert not after["dx"].isfinite().all()
    moves = {"running", "step", "window_x", "filtered", "skipped", "skipped_grad"}  # what the forward writes
    for name, _ in norm.named_buffers():
        if name not in moves:
            assert_close(after[name], before[name], rtol=0, atol=0)


# -- the automatic end of the warm-up ----------------------------------------------------------------------------------


AUTOMATIC = ("un", "power(groups=0)", "mabn")
WIDTH = 16


def drifting(steps: int, growth: int, rows: int = 50) -> list[torch.Tensor]:
    """Batches whose scale grows for `growth` steps, with noise from batch to batch."""
    generator = torch.Generator().manual_seed(1)
    scales = [1 + 3 * min(step, growth) / max(growth, 1) for step in range(steps)]
    return [
        torch.randn(rows, WIDTH, generator=generator) * scale * torch.exp(0.1 * torch.randn((), generator=generator))
        for scale in scales
    ]


def run_all(norm, given, call=None):
    """Run forward and backward on each batch; return the last gradient."""
    direction = torch.sin(torch.arange(WIDTH * len(given[0])).float()).view(-1, WIDTH)
    for rows in given:
        x = rows.clone().requires_grad_()
        ((norm if call is None else call)(x) * direction).sum().backward()
    return x.grad


@pytest.mark.parametrize("spec", AUTOMATIC)
def test_the_warmup_ends_after_the_drift(spec):
    ends = []
    for growth in (0, 100, 200):
        norm = make(spec, WIDTH)
        run_all(norm, drifting(330, growth))
        ends.append(int(norm.warmup_end))
    assert 60 < ends[0] < 120 < ends[1] < 200 < ends[2] < 330


@pytest.mark.parametrize("spec", AUTOMATIC)
def test_kernels_compiled_graphs_and_checkpointing_end_it_at_the_same_step(spec):
    given, plain = drifting(190, 40), make(spec, WIDTH)
    with normkit.kernels("reference"):
        expected = run_all(plain, given)
    assert 0 < int(plain.warmup_end) < 180
    native, compiled, saved = (make(spec, WIDTH) for _ in range(3))
    ways = (
        (native, None),
        (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True)),
        (saved, lambda x: checkpoint(saved, x, use_reentrant=False)),
    )
    for norm, call in ways:
        assert_close(run_all(norm, given, call), expected, rtol=1e-4, atol=1e-5)
        assert int(norm.warmup_end) == int(plain.warmup_end)
        assert_close(norm.averages, plain.averages)


def test_batches_that_are_not_finite_and_padding_do_not_count():
    given = drifting(190, 40)
    norm, other = make("un", WIDTH), make("un", WIDTH)
    run_all(norm, given)
    for x in given:
        padded = torch.cat([x, torch.full_like(x[:7], 1e4)])
        mask = torch.arange(len(padded)) < len(x)
        other(padded, mask)
        other(torch.full_like(x, math.nan))
    assert int(other.warmup_end) == int(norm.warmup_end) > 0
    assert int(other.skipped) == len(given)


@pytest.mark.parametrize(
    ("spec", "numbered"),
    [("un", "un(warmup=20)"), ("power(groups=0)", "power(groups=0, warmup=20)"), ("mabn", "mabn(warmup=20)")],
)
def test_norms_with_a_number_and_with_auto_load_each_other(spec, numbered):
    fixed, auto = make(numbered, WIDTH), make(spec, WIDTH)
    run_all(fixed, drifting(190, 40))
    auto.load_state_dict(fixed.state_dict())
    run_all(auto, drifting(150, 0)[:20])
    assert int(auto.warmup_end) == 0 < float(auto.lag)
    fixed.load_state_dict(auto.state_dict())
