"""A new norm takes over gains, statistics and further parameters of the old one."""

import copy

import pytest
import torch
from norm_cases import DIM, SPECS, batch, train_step, trained
from torch import nn
from torch.testing import assert_close

from normkit.models import calibrate, convert, find
from normkit.norms import NORMS, UN, PowerNorm, RowNorm, StatNorm, make, options, parse


@pytest.mark.parametrize("old", ["scale", "scale(learn=False)", "scale(affine=False)"])
@pytest.mark.parametrize("to", ["rms", "scale(eps=1e-6)", "scale(bias=True)"])
def test_one_length_becomes_gains_and_stays_a_length(old, to):
    """ScaleNorm(g) is RMSNorm(g / sqrt(dim)); its length is learned on if it was learned."""
    model, x = nn.Sequential(make(old, 16)), torch.randn(3, 16)
    if model[0].weight is not None:
        nn.init.constant_(model[0].weight, 0.7)
    converted = convert(model, to)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert converted[0].weight.requires_grad == (old == "scale")


def rows(n=64):
    return torch.randn(n, DIM) * torch.linspace(0.5, 4, DIM) + 1


@pytest.mark.parametrize("old", [*NORMS, "power(groups=0)"])
@pytest.mark.parametrize("to", [*NORMS, "power(groups=0)"])
def test_statistics_carry_over_only_to_norms_that_measure_the_same(old, to):
    """Statistics are right, as after calibration, or at their start."""
    model = nn.Sequential(make(old, DIM))
    batches = [rows()]
    measured = isinstance(model[0], StatNorm)
    model = calibrate(model, batches) if measured else model
    new = convert(model, to)[0]
    if isinstance(new, StatNorm):
        scaled = [isinstance(norm, PowerNorm) and norm.groups > 0 for norm in (model[0], new)]
        x = batches[0].double()
        x = x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() if scaled[1] else x
        mean, square = x.mean(0), x.square().mean(0)
        right = torch.stack([mean, square - mean**2]) if new.center else square[None]
        if measured and new.center and not model[0].center:
            right = torch.stack([0 * mean, square])  # of a quadratic mean: the same divisor
        start = make(to, DIM).running
        goes = measured and scaled[0] == scaled[1]
        torch.testing.assert_close(new.running, right.float() if goes else start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_reconverted_norm_keeps_options_parameters_and_state(spec):
    """Only what the spec sets is new."""
    norm = trained(spec)
    twin = copy.deepcopy(norm)
    twin.eps = 1e-6
    new = convert(norm, f"{parse(spec)[0]}(eps=1e-6)")
    assert new is not norm
    assert new.spec == twin.spec
    assert new.state_dict().keys() == twin.state_dict().keys()
    for training in (False, True, True):
        x, dy = batch(7, 6, DIM), batch(8, 6, DIM)
        assert_close(train_step(new.train(training), x, dy), train_step(twin.train(training), x, dy))


def test_options_of_the_spec_are_new():
    model = nn.Sequential(make("dyt(alpha=1.0)", DIM))
    nn.init.constant_(model[0].a, 2.0)
    assert convert(model, "dyt(bias=False)")[0].a == 2
    assert convert(model, "dyt(bias=False)")[0].alpha == 1.0
    assert convert(model, "dyt(alpha=0.25)")[0].a == 0.25
    assert convert(model, "dyt(bias=False)", inplace=True)[0].a is model[0].a, "an optimizer may hold it"
    un = nn.Sequential(trained("un(window=2, warmup=2)").float())
    assert convert(un, "un(window=3)")[0].step == 0, "a window of another size starts empty, and with it the count"
    assert_close(convert(un, "un(window=3)")[0].running, un[0].running)
    assert convert(un, "un(window=2, sync=True)")[0].step == un[0].step


def test_derf_takes_over_the_learned_width_of_dyt():
    model = nn.Sequential(make("dyt", DIM))
    nn.init.constant_(model[0].a, 2.0)
    new = convert(model, "derf")[0]
    assert (new.a.item(), new.s.item()) == (2.0, 0.0)
    x = rows()
    torch.testing.assert_close(new(x), torch.erf(2 * x))
    assert convert(convert(model, "derf"), "dyt")[0].a == 2


def test_a_derived_class_goes_by_the_norm_that_it_is():
    class Mine(UN):
        def __init__(self, dim, *, window=2, note="x"):
            super().__init__(dim, window=window)
            self.note = note

    class Own(RowNorm):
        def normalize(self, x, mask):
            return x

    model = nn.Sequential(Mine(DIM), Own(DIM))
    assert repr(model[0]) == f"Mine({DIM}, un(window=2))"
    assert repr(model[1]) == f"Own({DIM}, Own)"
    assert find(model)["0"].kind == "un(window=2)"
    train_step(model[0], batch(0, 6, DIM).float(), batch(1, 6, DIM).float())
    new = convert(model, {"0": "un(alpha=0.5)"})[0]
    assert (new.spec, new.step) == ("un(window=2, alpha=0.5)", 1)
    assert_close(new.running, model[0].running)


@pytest.mark.parametrize(("momentum", "alpha"), [(0.1, 0.9), (0.01, 0.99), (0.07, 0.93), (1.0, 0.0), (None, 0.9)])
def test_momentum_becomes_its_complement(momentum, alpha):
    model = nn.Sequential(nn.BatchNorm1d(DIM, momentum=momentum)).eval()
    assert convert(model, "batch")[0].alpha == alpha
    assert convert(model, "repbn")[0].alpha == alpha
    assert convert(model, "batch(alpha=0.5)")[0].alpha == 0.5
    assert convert(model, "un")[0].alpha == options("un")["alpha"]
    if momentum is not None:
        ours, x = convert(model, "batch"), rows()
        model.train(), ours.train()
        assert_close(ours(x), model(x), rtol=1e-4, atol=1e-5)
        assert_close(ours[0].running[1], model[0].running_var)


@pytest.mark.parametrize("change", [lambda m: convert(m, "pnv"), lambda m: convert(m, "rms"), copy.deepcopy])
def test_full_backward_hooks_still_run(change):
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), []
    model[1].register_full_backward_hook(lambda module, given, taken: calls.append(module))
    new = change(model)
    new(torch.randn(2, 4)).sum().backward()
    assert calls == [new[1]]
