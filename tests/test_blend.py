"""LayerNorm is replaced gradually by an offline norm: forwards, checkpoints, the result."""

import copy

import pytest
import torch
from third_party_models import CASES, case_of, padding, randomize
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision_stub import load_torchvision

from normkit.fold import fold
from normkit.models import Blend, blend, calibrate, convert, settle
from normkit.norms import NORMS, UN, LayerNorm, make

DIM = 6


def model_of(*norms: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for norm in norms for part in (nn.Linear(DIM, DIM), nn.Tanh(), norm)]
    return randomize(nn.Sequential(*layers, nn.Linear(DIM, 3)))


def rows(n: int = 20, seed: int = 0):
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.5, 2, DIM)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_forward_uses_the_share_of_the_schedule(schedule):
    torch.manual_seed(0)
    norm = randomize(nn.Sequential(nn.LayerNorm(DIM)))
    both = blend(norm, "un(warmup=1, window=1)", steps=4, schedule=schedule).train()
    alone = make("un(warmup=1, window=1)", DIM).train()
    for k in range(1, 8):
        x = rows(seed=k)
        old, new = norm[0](x), alone(x) * norm[0].weight + norm[0].bias
        share = max(0.0, 1 - k / 4)
        if schedule == "cosine":
            share = (1 - torch.cos(torch.tensor(torch.pi * share)).item()) / 2
        torch.testing.assert_close(both(x), share * old + (1 - share) * new, rtol=1e-4, atol=1e-5)
        assert both[0].step == k
    assert both[0].done


def test_before_training_the_model_is_unchanged():
    case = case_of("bert")
    both = blend(case.model, "un", steps=10, mask_from="attention_mask").eval()
    with torch.no_grad():
        torch.testing.assert_close(both(**case.kwargs).logits, case.model(**case.kwargs).logits, rtol=1e-4, atol=1e-5)
    kept = set(case.model.state_dict())
    assert kept <= set(both.state_dict())
    assert {id(p) for p in both.parameters()} & {id(p) for p in case.model.parameters()} == set()
    assert sum(p.numel() for p in both.parameters()) == sum(p.numel() for p in case.model.parameters())


KINDS = [*(name if name != "group" else "group(groups=2)" for name in NORMS), "taper(warmup=2, until=4)",
         "taper(warmup=2, until=9)", "layer(bias=False)", "rms(affine=False)", "scale(unit_init=True)"]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "to"),
    [*((old, "un") for old in KINDS), *((old, "scale") for old in KINDS), *(("torch", to) for to in KINDS)],
)
def test_blend_starts_as_the_old_norm_and_ends_as_the_new(old, to):
    """Includes parameters besides gain and bias, and gains that only one norm has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(DIM) if old == "torch" else make(old, DIM), nn.Linear(DIM, 2))
    tune(model, 6)
    both, x = blend(model, to, steps=5), rows(seed=9)
    torch.testing.assert_close(both.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    tune(both, 7)
    done = settle(both).eval()
    assert done[0].spec == convert(model, to)[0].spec
    torch.testing.assert_close(done(x), both.eval()(x), rtol=1e-4, atol=1e-5)
    kept = {key: value for key, value in both.state_dict().items() if not key.startswith("0.old.")}
    assert {key.replace("0.new.", "0.") for key in kept} - {"0.step"} == set(done.state_dict()) - {"0.step"}


def tune(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k in range(steps):
        optimizer.zero_grad()
        (model.train()(rows(seed=k) + 0.3) - rows(seed=k)[:, :2]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("old", ["scale", "scale(unit_init=True)", "scale(affine=False)"])
def test_one_length_becomes_gains(old):
    model, x = randomize(nn.Sequential(make(old, DIM))).eval(), rows()
    both = blend(model, "rms", steps=2)
    for _ in range(3):  # the two compute the same, so the share does not matter
        torch.testing.assert_close(both.eval()(x), model(x), rtol=1e-4, atol=1e-5)
        both.train()(x)
    torch.testing.assert_close(settle(both)(x), model(x), rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_shared_gain_through_both_norms():
    both = blend(model_of(nn.LayerNorm(DIM)), "batch", steps=4).double().train()
    x, dy = rows().double(), torch.randn(20, 3).double()
    both(x).backward(dy)
    analytic = both[2].weight.grad.clone()
    numeric = torch.zeros(DIM, dtype=torch.float64)
    for i in range(DIM):
        values = []
        for sign in (1, -1):
            moved = copy.deepcopy(both)
            moved[2].step.zero_()
            with torch.no_grad():
                moved[2].weight[i] += sign * 1e-5
                values.append((moved(x) * dy).sum())
        numeric[i] = (values[0] - values[1]) / 2e-5
    torch.testing.assert_close(analytic, numeric, rtol=1e-5, atol=1e-7)


def test_the_count_survives_a_checkpoint_and_resumes_exactly():
    both = blend(model_of(nn.LayerNorm(DIM), nn.LayerNorm(DIM)), "un(warmup=2)", steps=6).train()
    for k in range(3):
        both(rows(seed=k))
    again = blend(model_of(nn.LayerNorm(DIM), nn.LayerNorm(DIM)), "un(warmup=2)", steps=6).train()
    again.load_state_dict(both.state_dict())
    for k in range(3, 8):
        assert torch.equal(again(rows(seed=k)), both(rows(seed=k)))
    for (name, mine), theirs in zip(both.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_counts_once_and_recomputes_the_same(reentrant):
    plain = blend(model_of(nn.LayerNorm(DIM)), "un(warmup=1)", steps=4).train()
    again = copy.deepcopy(plain)
    for k in range(3):
        x, dy = rows(seed=k).requires_grad_(), torch.randn(20, 3)
        plain.zero_grad()
        again.zero_grad()
        plain(x).backward(dy)
        checkpoint(again, x, use_reentrant=reentrant).backward(dy)
        assert again[2].step == k + 1
        for (name, p), q in zip(plain.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=name)


def test_at_the_end_the_old_norm_is_gone_and_the_rest_folds():
    both = blend(model_of(nn.LayerNorm(DIM), nn.LayerNorm(DIM)), {"2": "un(warmup=1)", "5": "batch"}, steps=3).train()
    for k in range(5):
        both(rows(seed=k))
    done = settle(both).eval()
    assert not any(isinstance(m, Blend | LayerNorm | nn.LayerNorm) for m in done.modules())
    assert isinstance(done[2], UN)
    with torch.no_grad():
        torch.testing.assert_close(done(rows()), both.eval()(rows()))
    assert isinstance(both[2], Blend), "settle made a copy"
    names = set(model_of(nn.LayerNorm(DIM), nn.LayerNorm(DIM)).state_dict())
    assert names <= set(done.state_dict())
    folded, report = fold(done, rows())
    assert report.foldable == "2 of 2"
    torch.testing.assert_close(folded(rows()), done(rows()), rtol=1e-4, atol=1e-5)


def test_a_finished_blend_folds_before_it_is_settled_and_an_unfinished_one_is_refused():
    both = blend(model_of(nn.LayerNorm(DIM)), "un(warmup=1)", steps=2).train()
    both(rows())
    with pytest.raises(ValueError, match="1 of 2 training forwards done"):
        fold(both.eval(), rows())
    both.train()(rows())
    _, report = fold(both.eval(), rows())
    assert report.foldable == "1 of 1"


def test_masks_layouts_sharing_hooks_and_optimizers_survive():
    case = CASES["torch_encoder_pre"]()
    both = blend(case.model, "batch", steps=3, mask_from="src_key_padding_mask").train()
    x, mask = case.args[0], padding().bool()
    other = copy.deepcopy(both)
    both(x, src_key_padding_mask=~mask)
    other(torch.where(mask[..., None], x, 9.0), src_key_padding_mask=~mask)
    torch.testing.assert_close(other.norm.new.running, both.norm.new.running)

    shared = nn.LayerNorm(DIM)
    model = nn.ModuleList([shared, shared, nn.GroupNorm(2, DIM)])
    weights = {id(p) for p in model.parameters()}
    seen = []
    shared.register_forward_hook(lambda module, args, out: seen.append(out))
    changed = blend(model, "batch", steps=2, inplace=True)
    assert changed[0] is changed[1]
    assert {id(p) for p in changed.parameters()} == weights
    y = changed[2](torch.randn(3, DIM, 5))
    assert y.shape == (3, DIM, 5)
    changed[0](rows())
    assert len(seen) == 1
    settled = settle(changed, early=True)
    assert settled[0] is settled[1]
    assert settled[2](torch.randn(3, DIM, 5)).shape == (3, DIM, 5)


def test_statistics_can_be_calibrated_while_it_blends():
    both = blend(model_of(nn.LayerNorm(DIM)), "un", steps=5)
    done = calibrate(both, [rows()])
    torch.testing.assert_close(done[2].new.running[0], torch.tanh(both[0](rows())).square().mean(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_it_compiles_whole():
    both = blend(model_of(nn.LayerNorm(DIM)), "batch", steps=3).train()
    compiled = torch.compile(copy.deepcopy(both), backend="aot_eager", fullgraph=True)
    for k in range(4):
        torch.testing.assert_close(compiled(rows(seed=k)), both(rows(seed=k)))
    assert compiled._orig_mod[2].step == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_backward_has_the_share_of_its_own_step():
    eager = blend(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)), "un(warmup=2)", steps=5)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for k in range(5):
        grads = []
        for model in (eager, compiled):
            x = rows(seed=k).requires_grad_()
            (model(x) * rows(seed=9)).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


class Blocks(nn.Module):
    """Two pre-norm blocks and a final norm."""

    def __init__(self):
        super().__init__()
        names = ("norm1", "attention", "norm2", "mlp")
        parts = [nn.LayerNorm(DIM) if "norm" in name else nn.Linear(DIM, DIM) for name in 2 * names]
        self.h = nn.ModuleList(nn.ModuleDict(zip(names, parts[4 * i : 4 * i + 4], strict=True)) for i in range(2))
        self.final, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 2)

    def forward(self, x):
        for block in self.h:
            x = x + torch.tanh(block["attention"](block["norm1"](x)))
            x = x + torch.tanh(block["mlp"](block["norm2"](x)))
        return self.head(self.final(x))


def test_sites_are_replaced_one_after_the_other_in_the_given_order():
    torch.manual_seed(0)
    original = randomize(Blocks())
    default = ["h.0.norm2", "h.1.norm2", "h.0.norm1", "h.1.norm1", "final"]
    for order, places in ((None, default), (["final", "*norm1", "*"], ["final", *default[2:4], *default[:2]])):
        staged = blend(original, "un(warmup=1)", steps=1, gap=2, order=order).train()
        for step in range(1, 10):
            staged(rows()[None])
            shares = [float(staged.get_submodule(name).share()) for name in places]
            assert shares == [float(2 * place >= step) for place in range(5)]
            assert all(m.done for m in staged.modules() if isinstance(m, Blend)) == (step == 9)
        assert fold(settle(staged).eval(), rows()[None])[1].foldable == "5 of 5"


def test_a_staged_schedule_continues_from_a_checkpoint():
    torch.manual_seed(0)
    original = randomize(Blocks())
    settings = {"steps": 2, "gap": 2, "first_last": True}
    staged, again = (blend(original, "un(warmup=2)", **settings).train() for _ in range(2))
    for k in range(5):
        staged(rows(seed=k)[None])
    with pytest.raises(ValueError, match=r"5 of 5 blends are not done: h.0.norm1 has made 5 of 12"):
        settle(staged)
    again.load_state_dict(staged.state_dict())
    for k in range(5, 13):
        assert torch.equal(again(rows(seed=k)[None]), staged(rows(seed=k)[None]))
    assert torch.equal(settle(again)(rows()[None]), settle(staged)(rows()[None]))


def test_the_first_token_keeps_the_old_norm_until_all_sites_are_replaced():
    torch.manual_seed(0)
    original = randomize(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)))
    x = rows(24).view(2, 12, DIM).clone()
    x[:, 0] *= 100
    staged = blend(original, "pnv", steps=1, gap=1, first_last=True).train()
    for _ in range(2):
        y = staged(x)
    torch.testing.assert_close(y[:, 0], original(x)[:, 0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(y[:, 1:], original(x)[:, 1:], atol=1e-2)
    assert staged[0].new.running.max() < 10, "statistics leave it out"
    staged(x)
    assert staged[0].done
    assert staged[0].new.running.max() > 10
    with pytest.raises(ValueError, match=r"first tokens are x\[:, 0\]"):
        staged(x[0])


def test_frozen_statistics_stay_frozen_while_the_blend_trains():
    torchvision = load_torchvision()
    frozen = torchvision.ops.FrozenBatchNorm2d(4)
    frozen.running_mean.normal_()
    frozen.running_var.uniform_(0.5, 4)
    mixed = copy.deepcopy(blend(nn.Sequential(frozen), "un", steps=10**6)).train()
    x = torch.randn(8, 4, 3, 3)
    torch.testing.assert_close(mixed(x), frozen(x), rtol=1e-4, atol=1e-4)


def test_bad_input_raises():
    with pytest.raises(ValueError, match=r"'norm9' of order matches no site"):
        blend(Blocks(), "un", steps=1, gap=1, order=["norm9", "*"])
    with pytest.raises(ValueError, match=r"order leaves out final; add a pattern"):
        blend(Blocks(), "un", steps=1, gap=1, order=["h.*"])
    for order in ([3], "h.*"):
        with pytest.raises(ValueError, match="order must be a list of patterns"):
            blend(Blocks(), "un", steps=1, gap=1, order=order)
    with pytest.raises(ValueError, match=r"gap must be a whole number of at least 0; got -1"):
        blend(Blocks(), "un", steps=1, gap=-1)
    with pytest.raises(ValueError, match=r"blend\(\) found no norm"):
        blend(nn.Sequential(nn.Linear(3, 3)), "un", steps=3)
    for steps in (0, 1.5, True):
        with pytest.raises(ValueError, match="steps must be a whole number"):
            blend(nn.LayerNorm(3), "un", steps=steps)
    with pytest.raises(ValueError, match='"linear" or "cosine"'):
        blend(nn.LayerNorm(3), "un", steps=3, schedule="step")
    with pytest.raises(ValueError, match=r"nothing that blends; the norms are 0"):
        settle(nn.Sequential(nn.LayerNorm(3)))
    with pytest.raises(ValueError, match=r"1 of 1 blends are not done: 0 has made 0 of 3"):
        settle(blend(nn.Sequential(nn.LayerNorm(3)), "un", steps=3))


def test_a_blend_cannot_be_blended_again():
    model = blend(nn.Sequential(nn.LayerNorm(4)), "un", 5)
    with pytest.raises(ValueError, match=r"0 is a Blend, .*call settle\(model\) before another"):
        blend(model, "pnv", 7)
    assert "step=? of 5" in repr(model.to("meta"))
