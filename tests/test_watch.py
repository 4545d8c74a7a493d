"""Recorded values are right, and recording does not change the training."""

import copy
import math

import pytest
import torch
from small_models import built
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.kernels.async_counter import AsyncCounter
from normkit.models import unreadable
from normkit.watch import QUANTITIES, Recorder
from normkit.watch.sites import sites

EXPENSIVE = [name for name, quantity in QUANTITIES.items() if quantity.expensive]


def batch(seed, *shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + 0.5


def train(model, batches, **options):
    """Train by a made-up target; the rows, by quantity, of the steps."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with normkit.record(model, every=options.pop("every", 1), **options) as rows:
        for x in batches:
            optimizer.zero_grad()
            y = model(x)
            (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
            optimizer.step()
    return list(rows)


def only(rows, quantity, site=None):
    return [row.value for row in rows if row.quantity == quantity and site in (None, row.site)]


def chain(*norms):
    torch.manual_seed(0)
    parts = [part for norm in norms for part in (nn.Linear(6, 6), norm)]
    return nn.Sequential(*parts).double()


def make(name):
    return normkit.make("group(groups=2)" if name == "group" else name, 6)


def randomized(norm):
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    return norm


def test_distances_and_gaps_of_a_third_party_norm():
    """Batch statistics are compared with a running average, which is a plain mean at first."""
    xs = [batch(seed, 5, 4, 6) for seed in range(3)]
    rows = train(nn.Sequential(nn.LayerNorm(6)).double(), xs)
    flat = [x.flatten(0, 1) for x in xs]
    mean, var, quadratic = ([f(x) for x in flat] for f in (
        lambda x: x.mean(0), lambda x: x.var(0, unbiased=False), lambda x: x.square().mean(0)))  # fmt: skip
    for name, batches in (("mean", mean), ("var", var), ("quadratic", quadratic)):
        expected = [(batches[1] - batches[0]).norm() / 6, (batches[2] - (batches[0] + batches[1]) / 2).norm() / 6]
        torch.testing.assert_close(
            torch.tensor(only(rows, f"distance_{name}")), torch.stack(expected), check_dtype=False
        )

    sigma, running = (var[1] + 1e-5).sqrt(), (var[0] + 1e-5).sqrt()
    z_batch, z_running = (flat[1] - mean[1]) / sigma, (flat[1] - mean[0]) / running
    gap = (z_running - z_batch).square().mean().sqrt()
    assert only(rows, "gap_batch")[0] == pytest.approx(float(gap), rel=1e-4), "eps counts in z, not in its size"
    psi, psi_running = ((q + 1e-5).sqrt() for q in (quadratic[1], quadratic[0]))
    off = (flat[1] / psi_running - flat[1] / psi).square().mean().sqrt()
    assert only(rows, "gap_quadratic")[0] == pytest.approx(float(off), rel=1e-4)
    assert only(rows, "largest") == pytest.approx([float(x.abs().max()) for x in xs])
    assert only(rows, "rms") == pytest.approx([float(x.square().mean().sqrt()) for x in xs])
    assert only(rows, "tokens") == [20, 20, 20]


@pytest.mark.parametrize(
    "norm", ["batch", "pnv", "power(groups=0, warmup=1)", "power(groups=2)", "un(window=2, warmup=2)"]
)
def test_a_normkit_norm_is_compared_with_its_own_statistics(norm):
    model = nn.Sequential(normkit.make(norm, 6)).double()
    before = []
    handle = model[0].register_forward_pre_hook(lambda module, args: before.append(module.running.clone()))
    xs = [batch(seed, 20, 6) for seed in range(3)]
    rows = train(model, xs)
    handle.remove()
    name = "distance_var" if norm == "batch" else "distance_quadratic"
    for x, running, value in zip(xs, before, only(rows, name), strict=True):
        x = model[0].rest(x)  # noqa: PLW2901
        seen = x.var(0, unbiased=False) if norm == "batch" else x.square().mean(0)
        assert value == pytest.approx(float((seen - running[-1]).norm() / 6))
    assert len(only(rows, "distance_mean")) == (3 if norm == "batch" else 2), "the mean of the norm, or of the recorder"
    if norm == "power(groups=0, warmup=1)":
        expected = [float((x.square().mean(0) / (r[0] + 1e-5)).max()) for x, r in zip(xs, before, strict=True)]
        expected[0] = 1.0  # the batch itself, in the warm-up
        assert only(rows, "Gamma") == pytest.approx(expected, rel=1e-4)
        assert only(rows, "Gamma_bound") == pytest.approx([20, 20, 20])
        assert only(rows, "nu")[0] == 0 < only(rows, "nu")[2]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6), nn.GroupNorm(2, 6)])
@pytest.mark.parametrize("spec", ["", "batch", "un", "layer"])
def test_channels_that_do_not_come_last(norm, spec):
    """Also if width and channels are equal, so that the shape does not show the axes."""
    xs = [batch(seed, 5, 6, 3, 6) for seed in range(2)]
    model = nn.Sequential(copy.deepcopy(norm))
    model = (normkit.convert(model, spec) if spec else model).double()
    rows = train(model, xs)
    flat = [x.movedim(1, -1).reshape(-1, 6) for x in xs]
    assert only(rows, "tokens") == [len(x) for x in flat]
    own = spec == "batch" or (not spec and isinstance(norm, nn.BatchNorm2d))  # a mean of its own, 0 in the first step
    expected = flat[0].mean(0) if own else flat[1].mean(0) - flat[0].mean(0)
    assert only(rows, "distance_mean")[0] == pytest.approx(float(expected.norm() / 6))


def test_norms_of_weights_are_not_recorded():
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    model = nn.Sequential(normkit.fix_embedding(nn.Embedding(5, 6)), normkit.make("scale", 6), linear)
    assert [site.name for site in sites(model)] == ["1"]
    assert not unreadable(model)
    assert type(normkit.convert(model, "rms")[1]) is normkit.RMSNorm, "without a warning"


def test_gradient_statistics_are_what_the_backward_pass_has():
    """PN-V: the ratio of Lemma 2 is the size of dL/dx.

    BatchNorm: g_mu and g_sigma2 as in Eq. 3.
    """
    for name in ("pnv", "batch"):
        norm = randomized(normkit.make(name, 6)).double()
        x, dy = batch(0, 30, 6).requires_grad_(), batch(1, 30, 6)
        with normkit.record(norm, every=1) as rows:
            norm(x).backward(dy)
        rows = list(rows)
        g = dy * norm.weight.detach()
        psi = (x.detach().square().mean(0) + 1e-5).sqrt()
        z = (x.detach() - x.detach().mean(0)) / (x.detach().var(0, unbiased=False) + 1e-5).sqrt()
        assert only(rows, "g_psi2") == pytest.approx([float((g * x.detach() / psi).mean(0).norm() / 6)])
        assert only(rows, "g_mu") == pytest.approx([float(g.mean(0).norm() / 6)])
        assert only(rows, "g_sigma2") == pytest.approx([float((g * z).mean(0).norm() / 6)])
        if name == "pnv":
            assert only(rows, "lipschitz") == pytest.approx([float(x.grad.norm() / dy.norm())], rel=1e-4)
            ratio = norm.weight.detach().abs() / psi
            spread = [only(rows, f"gamma_over_psi_{q}")[0] for q in ("min", "median", "max")]
            assert spread == pytest.approx([float(torch.quantile(ratio, q)) for q in (0, 0.5, 1)])


def test_the_gradient_norm_is_that_of_all_parameters():
    model = chain(nn.LayerNorm(6))
    x = batch(0, 8, 6)
    with normkit.record(model, every=2) as rows:
        for step in range(3):
            model.zero_grad()
            (model(x).pow(3).sum() * (step + 1)).backward()
            if step == 0:
                expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert [row.step for row in rows if row.quantity == "gradient_norm"] == [1, 3]
    assert only(rows, "gradient_norm") == pytest.approx([float(expected), 3 * float(expected)])


@pytest.mark.parametrize("norm", normkit.NORMS)
def test_nothing_about_the_training_changes(norm):
    xs = [batch(seed, 12, 6) for seed in range(6)]
    models = [chain(make(norm), nn.LayerNorm(6)) for _ in range(2)]
    rows = train(models[0], xs, quantities="all", every=2)
    optimizer = torch.optim.SGD(models[1].parameters(), 1e-2)
    for x in xs:
        optimizer.zero_grad()
        y = models[1](x)
        (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
        optimizer.step()
    for mine, theirs in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert {row.step for row in rows} == {1, 3, 5}
    assert {row.site for row in rows} == {"1", "3", ""}
    assert {row.norm for row in rows if row.site == "1"} == {make(norm).spec}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in models[0].modules())


def test_recording_does_not_read_from_the_device(monkeypatch):
    """No value is read from the device between the start and the end."""

    def read(*args):
        raise AssertionError("a value was read from the device")

    model = chain(nn.LayerNorm(6), normkit.make("power(groups=0)", 6), normkit.make("un(outlier_filtration=True)", 6))
    with normkit.record(model, every=1, quantities="all", keep=3000) as rows:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, read)
            patch.setattr(AsyncCounter, "at_least", lambda *_: False)  # which on a GPU does not wait
            for seed in range(40):
                model(batch(seed, 12, 6)).sum().backward()
        assert 2900 < sum(bool(row.site) for row in rows) <= 3000


def test_memory_is_bounded(tmp_path):
    xs = [batch(seed, 8, 6) for seed in range(30)]
    model = chain(nn.LayerNorm(6))
    rows = train(model, xs, keep=100)
    assert 50 < sum(bool(row.site) for row in rows) <= 100
    assert rows[-1].step == 30
    assert [row.step for row in rows if not row.site] == list(range(1, 31)), "a run is judged by its start, too"
    with normkit.record(model, every=1, keep=100, to=tmp_path / "rows.csv") as rows:
        for x in xs:
            model(x).sum().backward()
    whole = normkit.watch.read(tmp_path)
    assert len(whole) > 600, "all of them are in the file"
    assert [row.step for row in whole] == sorted(row.step for row in whole)
    assert sum(bool(row.site) for row in rows) <= 100


class Text(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.out = nn.Embedding(9, 6, padding_idx=0), norm, nn.Linear(6, 9)

    def forward(self, ids, attention_mask=None):
        return self.out(self.norm(self.embed(ids)))


def test_padding_is_found_by_the_embedding():
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    values = {}
    for norm in (nn.LayerNorm(6), normkit.make("pnv", 6), nn.BatchNorm1d(4)):
        model = Text(norm)
        with normkit.record(model, every=1) as rows:
            model(ids)
        values[type(norm).__name__] = {row.quantity: row.value for row in rows}
    real = Text(None).embed(ids)[ids != 0].detach()
    assert values["LayerNorm"]["tokens"] == 5, "the mask is used in the place of a per-token norm"
    assert values["LayerNorm"]["rms"] == pytest.approx(float(real.square().mean(0).mean().sqrt()))
    assert values["LayerNorm"]["padding"] == 0
    assert values["PNV"]["tokens"] == 8
    assert values["PNV"]["padding"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("norm", ["layer", "power(warmup=1)"])
def test_a_recomputed_forward_is_recorded_once(norm):
    def forward(m, x):
        x = m.first(x)
        return m.inner(x) if kind is None else checkpoint(m.inner, x, use_reentrant=kind)

    found = {}
    for kind in (None, True, False):
        torch.manual_seed(0)
        model = built(forward, first=nn.Linear(6, 6).double(), inner=chain(normkit.make(norm, 6)))
        rows = train(model, [batch(seed, 8, 6) for seed in range(3)])
        found[kind] = {row[:4]: row.value for row in rows}
        assert len(found[kind]) == len(rows)
    for reentrant in (True, False):
        assert found[reentrant] == pytest.approx(found[None], rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, torch 2.11
@pytest.mark.parametrize("how", ["whole", "inside", "itself"])
def test_a_compiled_model_gives_the_same_rows(how):
    xs = [batch(seed, 8, 6) for seed in range(3)]
    eager = train(chain(normkit.make("pnv", 6)), xs, every=2)
    model = chain(normkit.make("pnv", 6))
    torch._dynamo.reset()
    if how == "itself":
        model.compile(backend="aot_eager", fullgraph=True)
        run = model
    else:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        run = nn.Sequential(run) if how == "inside" else run
    rows = train(run, xs, every=2)
    mine = {(row.step, row.site[2 * (how == "inside") :], row.quantity): row.value for row in rows}
    theirs = {(row.step, row.site, row.quantity): row.value for row in eager}
    assert mine.keys() == theirs.keys()
    assert [mine[key] for key in theirs] == pytest.approx(list(theirs.values()), rel=1e-5, abs=1e-12)
    with torch.no_grad():
        run(xs[0])  # the graph still has the operators, which now do nothing


def test_evaluation_and_calls_of_parts_are_not_steps():
    model = chain(normkit.make("pnv", 6), nn.LayerNorm(6))
    x = batch(0, 8, 6)

    def forwards():
        model(x)
        with torch.no_grad():
            model.eval()(x)
        model(x)
        model.train()
        model[1](x)
        model(x)

    warned = pytest.warns(UserWarning, match="1 forwards")
    with warned, normkit.record(model, every=1, quantities=["rms"]) as rows:
        forwards()
    assert [(row.step, row.site) for row in rows] == [(1, "1"), (1, "3"), (2, "1"), (2, "3")]


def test_norms_that_are_never_measured_are_a_warning():
    model, x = chain(nn.BatchNorm1d(6), nn.LayerNorm(6)), batch(0, 8, 6)
    model[1].eval()
    with pytest.warns(UserWarning, match=r"not recorded: 1$"), normkit.record(model, every=1):
        model(x)
    compiled = torch.compile(chain(nn.LayerNorm(6)), backend="aot_eager")
    compiled(x)
    with pytest.warns(UserWarning, match="in 2 steps"), normkit.record(compiled, every=1):
        compiled(x), compiled(x)


def test_trainings_that_cannot_be_right_are_warnings():
    x, criterion = batch(0, 8, 6), nn.MSELoss()
    model = chain(nn.LayerNorm(6), nn.BatchNorm1d(6))
    with pytest.warns(UserWarning, match="1 forwards without gradients"), normkit.record(model, every=1):
        model(x).sum().backward(), torch.no_grad()(model)(x)
    with pytest.warns(UserWarning, match="no gradient reached"), normkit.record(model, every=1, loss=criterion):
        criterion(model(x).detach(), x), criterion(model(x).detach(), x)
    with pytest.warns(UserWarning, match="came into the model"), normkit.record(model, every=1):
        model.append(nn.LayerNorm(6).double())(x)
    with pytest.warns(UserWarning, match="unset"), normkit.record(model, every=1, loss=lambda: unset):  # noqa: F821
        model(x), model(x)
    with pytest.raises(ValueError, match="loss"), normkit.record(model, loss=nn.MSELoss):
        pass


def test_a_norm_behind_which_something_is_detached_has_no_gradient():
    model = built(lambda m, x: m.b(m.a(x).detach()), a=nn.LayerNorm(6), b=nn.LayerNorm(6))
    with normkit.record(model.double(), every=1) as rows:
        for seed in range(3):
            model(batch(seed, 8, 6).double()).sum().backward()
    assert (only(rows, "no_gradient", "a"), only(rows, "no_gradient", "b")) == ([1.0, 1.0], [0.0, 0.0, 0.0])


def test_recording_compiles_a_model_once():
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, x = torch.compile(chain(nn.LayerNorm(6), nn.LayerNorm(6)), backend=counted), batch(0, 8, 6)
    with normkit.record(compiled, every=2):
        for _ in range(4):
            compiled(x).sum().backward()
    assert counted.frame_count == 1


def test_windows_of_one_channel_and_of_all():
    xs = [batch(seed, 8, 6) for seed in range(64)]
    rows = train(nn.Sequential(nn.LayerNorm(6)).double(), xs, quantities=["default", *EXPENSIVE])
    values = torch.stack([x.square().mean(0) for x in xs])
    last = values[-4:, 0]
    assert only(rows, "channel_activation")[-1] == pytest.approx(float(last[-1]))
    assert only(rows, "channel_activation_am")[-1] == pytest.approx(float(last.mean()))
    assert only(rows, "channel_activation_gm")[-1] == pytest.approx(float(last.log().mean().exp()))
    stats = pytest.importorskip("scipy.stats")
    normal = [(stats.normaltest(values[i : i + 32].numpy()).pvalue > 0.05).mean() * 100 for i in (0, 32)]
    assert only(rows, "pnac_activation") == pytest.approx(normal), "once a window of 32 samples"
    assert len(only(rows, "pnac_gradient")) == 2


def test_a_resumed_recorder_gives_the_same_rows():
    xs = [batch(seed, 8, 6) for seed in range(20)]
    whole, rows, state = [], [], {}
    for parts, out in (([xs], whole), ([xs[:8], xs[8:]], rows)):
        torch.manual_seed(0)
        model, done, state = nn.Sequential(nn.LayerNorm(6)).double(), 0, {}
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for part in parts:
            recorder = Recorder(model, 3, "all", start=done)
            recorder.load(state)
            recorder.follow()
            for x in part:
                optimizer.zero_grad()
                loss = model(x).pow(3).mean()
                recorder.add_loss(loss)
                loss.backward()
                optimizer.step()
            state, done = recorder.state(), done + len(part)
            out += list(recorder.rows)
            recorder.close()
    assert rows == whole
    assert {row.quantity for row in rows} >= {"loss", "gap_batch"}


class DTensor(nn.Parameter):
    """Has the class name that FSDP2 gives to parameters."""


def test_wrong_arguments_leave_no_hooks(tmp_path):
    sharded = nn.LayerNorm(3)
    sharded.weight = DTensor(torch.ones(3))
    for model, options, error, name in (
        (nn.LayerNorm(3), {"every": 0}, ValueError, "every"),
        (nn.LayerNorm(3), {"keep": 0}, ValueError, "keep"),
        (nn.LayerNorm(3), {"quantities": ["rsm"]}, ValueError, "rms"),
        (nn.LayerNorm(3), {"loss": 3.0}, ValueError, "loss"),
        (nn.LayerNorm(3), {"loss": nn.functional.cross_entropy}, TypeError, "arguments"),
        (nn.LayerNorm(3), {"loss": lambda: 1 / 0}, ZeroDivisionError, "division"),
        (nn.LayerNorm(3), {"to": tmp_path / "no" / "x.csv"}, ValueError, "no folder"),
        (nn.Linear(4, 4), {}, ValueError, "Linear"),
        (sharded, {}, ValueError, "FSDP2"),
    ):
        with pytest.raises(error, match=name), normkit.record(model, **options):
            model(torch.ones(2, 3))
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    with normkit.record(line := nn.Linear(4, 4), every=1, quantities=["gradient_norm"]):
        line(torch.ones(2, 4))


def test_every_quantity_is_recorded_somewhere():
    """Some model fills each row of the table."""
    model = chain(normkit.make("power(groups=0)", 6), normkit.make("un(outlier_filtration=True)", 6), nn.LayerNorm(6))
    rows = train(model, [batch(seed, 8, 6) for seed in range(33)], quantities="all")
    text, criterion, ids = Text(nn.LayerNorm(6)), nn.CrossEntropyLoss(), torch.tensor([[1, 0]])
    with normkit.record(text, every=1, loss=criterion) as more, torch.autocast("cpu", torch.float16):
        criterion(text(ids).flatten(0, 1).float(), ids.flatten()).backward()
    assert {row.quantity for row in [*rows, *more]} == set(QUANTITIES) - {"mask_length"}  # see test_masks.py


class WithLoss(Text):
    """Returns what models of transformers return."""

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_the_loss_is_found_in_three_ways():
    """The mean over the steps since the last sample, and the entropy of the targets, which ignores -100."""
    ids, labels = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 5, 6, -100]])
    models = WithLoss(nn.LayerNorm(6)), Text(nn.LayerNorm(6)), Text(nn.LayerNorm(6))
    criterion, last, found = nn.CrossEntropyLoss(), None, []
    for model, loss in zip(models, (None, criterion, lambda: last), strict=True):
        model.load_state_dict(models[0].state_dict())
        with normkit.record(model, every=2, quantities=["loss", "constant_loss"], loss=loss) as rows:
            for factor in (1, 2, 3):
                with torch.no_grad():
                    model.out.weight.mul_(factor)
                if isinstance(model, WithLoss):
                    last = model(ids, labels=labels)["loss"]
                else:
                    last = criterion(model(ids).flatten(0, 1), labels.flatten())
                found.append(last.item())
        one, two, three = found[-3:]
        assert only(rows, "loss") == pytest.approx([one, (two + three) / 2])
        entropy = [-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))] * 2
        assert only(rows, "constant_loss") == pytest.approx([] if callable(loss) and loss is not criterion else entropy)


@pytest.mark.parametrize(
    ("criterion", "targets", "constant"),
    [
        (nn.MSELoss(), torch.tensor([1.0, 3.0, 5.0, 7.0]), 5.0),
        (nn.BCEWithLogitsLoss(), torch.tensor([1.0, 0.0, 0.0, 0.0]), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))),
        (nn.MSELoss(), torch.tensor([[-1.0, 9.0], [1.0, 9.0]]), 0.5),  # of each column
        (nn.BCEWithLogitsLoss(), torch.tensor([[0.0, 1.0], [1.0, 1.0]]), math.log(2) / 2),
        (nn.L1Loss(), torch.ones(4), None), (nn.MSELoss(reduction="sum"), torch.ones(4), None),
        (type("Own", (nn.MSELoss,), {"forward": lambda _, x, y: (x - y).square().mean() / 8})(), torch.ones(4), None),
    ],
)  # fmt: skip
def test_the_loss_of_a_constant_prediction_is_known_for_numbers_too(criterion, targets, constant):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, targets[0].numel()))
    with normkit.record(model, every=1, loss=criterion) as rows:
        criterion(model(torch.randn(len(targets), 4)).view_as(targets), targets).backward()
    assert only(rows, "constant_loss") == ([] if constant is None else [pytest.approx(constant)])


def test_targets_of_several_lengths_or_losses_have_one_constant_or_none():
    model, criterion = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), nn.MSELoss()
    with normkit.record(model, every=1, loss=criterion, quantities=["constant_loss"]) as rows:
        for targets in (torch.tensor([[1.0, 3.0]]), torch.tensor([[5.0, 7.0, 9.0]])):
            criterion(model(torch.randn(*targets.shape, 4))[..., 0], targets).backward()
    assert only(rows, "constant_loss") == [pytest.approx(each) for each in (0.0, 8.0)]
    with normkit.record(model, every=1, loss=criterion, quantities=["loss", "constant_loss"]) as rows:
        y = model(torch.randn(2, 4))
        (criterion(y, torch.ones(2, 1)) + criterion(y, torch.zeros(2, 1))).backward()
    assert len(only(rows, "loss")) == 1
    assert not only(rows, "constant_loss"), "two losses in a step"


def test_the_loss_of_trainer_is_that_of_one_batch():
    """It divides by the labels of all batches of a step."""
    transformers = pytest.importorskip("normkit.models.huggingface").import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.arange(10).view(2, 5)
    expected = model(input_ids=ids, labels=ids)["loss"].item()
    with normkit.record(model, every=1) as rows:
        model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(4 * 8))["loss"].backward()
    assert only(rows, "loss") == [pytest.approx(expected, rel=1e-5)]
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    classifier = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=16, **small)).train()
    with normkit.record(classifier, every=1) as rows:  # does not divide
        out = classifier(input_ids=ids, labels=torch.tensor([0, 1]), num_items_in_batch=torch.tensor(8))
        out["loss"].backward()
    assert only(rows, "loss") == [pytest.approx(out["loss"].item(), rel=1e-5)]
