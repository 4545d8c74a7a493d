"""Faults are found where they are, and not in healthy runs."""

import pytest
import torch
import watch_runs
from torch import nn

import normkit
from normkit import watch
from normkit.watch import NOT_CHECKED, THRESHOLDS, Recording, Row, diagnose
from normkit.watch.checks import target_share


def sample(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fit(model, batches, lr=1e-3, every=1):
    """Train a model to reproduce its input; its rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    criterion = nn.MSELoss()
    with normkit.record(model, every=every, loss=criterion) as rows:
        for x in batches:
            optimizer.zero_grad()
            criterion(model(x), x).backward()
            optimizer.step()
    return list(rows)


def faults(rows):
    return [finding for finding in diagnose(rows) if finding.kind != NOT_CHECKED]


def kinds(rows):
    return [finding.kind for finding in faults(rows)]


def unchecked(rows):
    return " ".join(finding.message for finding in diagnose(rows) if finding.kind == NOT_CHECKED)


EXPLODED = {"collapsed tokens", "loss"}
CONSEQUENCES = {  # what else is found in runs of known fate: together they hold the thresholds from both sides
    "collapse, seed 0": {"loss"}, "collapse, seed 1": {"loss"}, "collapse 0.03": {"exploding", "loss"},
    "explosion 0.1": {"collapsed tokens", "loss"}, "explosion 0.3": EXPLODED, "explosion 1": EXPLODED,
    "late explosion": EXPLODED, "targets of other inputs 0.001": {"collapsed tokens"},
    "targets of other inputs 0.003": {"collapsed tokens"},
}  # fmt: skip


def test_forty_runs_of_known_fate():
    """All but one are judged right: at a rate between, only the loss shows the fault."""
    runs = watch_runs.read()
    expected = {name: {fate.kind} - {""} | CONSEQUENCES.get(name, set()) for name, fate in watch_runs.RUNS.items()}
    assert len(runs) >= 40
    assert {name: set(kinds(rows)) for name, rows in runs.items()} == expected | {"collapse 0.005": {"loss"}}


@pytest.mark.parametrize(("norm", "hit"), [("batch", True), ("pnv", False)])
def test_batches_unlike_each_other_in_their_means(norm, hit):
    """Each batch has another mean: only the quadratic mean represents them."""
    batches = [sample(step, 64, 16) * 0.3 + torch.where(sample(step + 500, 16) > 0, 1.0, -1.0) for step in range(60)]
    found = faults(fit(nn.Sequential(normkit.make(norm, 16)), batches))
    assert [(finding.kind, finding.where) for finding in found] == [("evaluation", ("0",))] * hit
    assert all(finding.evidence["0"] > THRESHOLDS["gap"].value for finding in found)


LARGE = [sample(step, 64, 16) * (30.0 if step % 2 else 1.0) for step in range(60)]
SMALL = [sample(step, 4, 16) for step in range(40)]
CHANGING = [sample(step, 64, 16) * (1 + 0.3 * float(sample(step + 900, 1))) for step in range(80)]
EQUAL, LONG = (
    [sample(step, 32, length, 16) + weight * length for step, length in enumerate([3 + 7 * n % 5 for n in range(60)])]
    for weight in (0.0, 0.1)
)


@pytest.mark.parametrize(
    ("norm", "batches", "kind", "hit"),
    [
        ("batch", LARGE, "evaluation", True),
        ("pnv", LARGE, "evaluation", True),
        ("batch", LONG, "batch length", True),
        ("pnv", LONG, "batch length", True),
        ("batch", EQUAL, "batch length", False),
        ("un(warmup=8)", LONG, "batch length", False),
        ("batch", SMALL, "tiny batches", True),
        ("layer", SMALL, "tiny batches", False),
        ("un(warmup=5, outlier_filtration=True, threshold='channel')", CHANGING, "filtered", True),
    ],
)
def test_batches_that_do_not_suit_their_norm(norm, batches, kind, hit):
    """They differ in size, carry their length in their means, are small, or change at every step."""
    assert (kind in kinds(fit(nn.Sequential(normkit.make(norm, 16)), batches))) == hit


def pairs(by, steps=200):
    """Rows of an encoder and a decoder, for batches of 32 pairs sorted by `by` of their lengths."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, 12, (32 * steps,), generator=generator)
    both = torch.stack([source, source + torch.randint(2, (32 * steps,), generator=generator)], 1)
    key = (both[:, 0] * 100 + (both[:, 1] if by == 2 else 0)) if by else torch.zeros(len(both))
    batches = both[key.argsort(stable=True)].view(steps, 32, 2).double()
    for step, place in enumerate(torch.randperm(steps, generator=generator).tolist()):
        for site, lengths in zip(("encoder", "decoder"), batches[place].T, strict=True):
            values = {"length": lengths.mean(), "length_spread": lengths.std(correction=0), "length_share": 0.5}
            yield from (Row(step + 1, site, "batch", name, float(value)) for name, value in values.items())


@pytest.mark.parametrize(("by", "low", "high"), [(0, 0.0, 0.01), (1, 0.01, 0.05), (2, 0.5, 1.0)])
def test_share_of_target_lengths_between_batches(by, low, high):
    """Two lengths of targets for each source: 1 / 32 is chance for batches by source."""
    assert low <= target_share(Recording(pairs(by))) < high
    assert ("batch length" in kinds(pairs(by))) == (by == 2)


def test_lengths_that_follow_from_the_sources():
    """A batch has one length, and the last norm sees one token more, as with a class token."""
    rows = []
    for step in range(12):
        values = {"encoder": 5.0 + step % 3, "decoder": 6.0 + step % 3}
        rows += [Row(step, site, "batch", "length", value) for site, value in values.items()]
        rows += [Row(step, site, "batch", "length_spread", 0.0) for site in values]
    assert target_share(Recording(rows)) == 0


@pytest.mark.parametrize(
    ("end", "found"), [(1.0, {"loss", "collapsed tokens"}), (0.5, set()), (None, {"collapsed tokens"})]
)
def test_tokens_that_are_alike_while_the_loss_falls_have_not_collapsed(end, found):
    rows = [Row(step, "norm", "LayerNorm", "similarity", 0.99) for step in range(1, 201, 20)]
    rows += [Row(step, "", "", "loss", 1.0 + (end - 1.0) * step / 200) for step in range(1, 201, 20) if end is not None]
    assert set(kinds(rows)) == found


def test_inputs_that_grow_from_small_initial_weights_do_not_explode():
    rows = [Row(step, site, "LayerNorm", "rms", 0.02 if step < 5 else late) for step in range(40)
            for site, late in (("first", 0.07), ("last", 2.5))]  # fmt: skip
    assert not faults([*rows, *(Row(step, "", "", "loss", 1.0) for step in range(40))][:80])


def test_the_first_norm_that_is_not_finite_is_named():
    rows = [Row(step, site, "LayerNorm", "nonfinite", float(step > 5 or (step, site) == (5, "third")))
            for step in range(9) for site in ("first", "second", "third")]  # fmt: skip
    [finding] = faults(rows)
    assert finding.evidence["step"] == 5
    assert "from third on" in finding.message


def test_running_statistics_that_a_nan_batch_has_corrupted():
    """The step is skipped, as a loss scaler does; PyTorch's BatchNorm keeps NaN for good."""
    model = nn.Sequential(nn.BatchNorm1d(16))
    with normkit.record(model, every=3) as rows:
        for step in range(31):
            model(sample(step, 64, 16) * (torch.nan if step == 13 else 1)).square().mean().backward()
    [finding] = faults(rows)
    assert (finding.kind, finding.where) == ("nan", ("0",))


def test_nu_beyond_its_bound():
    """psi_B^2 grows by q = 4 a step: Gamma goes to (q - .9) / .1 = 31, above its bound."""
    norm = normkit.make("power(groups=0, warmup=2)", 16).double()
    with normkit.record(norm, every=1) as rows:
        for step in range(40):
            x = sample(0, 64, 16).double() * 2.0**step
            norm(x).backward(sample(1, 64, 16).double())
    assert "nu" in kinds(rows)


@pytest.mark.parametrize(
    "spec", ["un(warmup={})", "power(warmup={})", "mabn(window=4, warmup={})", "renorm(warmup={})"]
)
def test_a_run_that_ends_inside_the_warm_up_of_statistics(spec):
    """The default of thousands of steps exceeds a short run."""
    left = 35.0 if spec.startswith(("un", "mabn")) else 36.0  # as the fifth step finds it; windows begin at step 40
    for warmup, evidence in ((40, [{"0": left}]), (3, [])):
        model = nn.Sequential(normkit.make(spec.format(warmup), 8), nn.Linear(8, 8))
        found = diagnose(fit(model, [sample(step, 64, 8) for step in range(5)]))
        assert [finding.evidence for finding in found if finding.kind == "warm-up"] == evidence


def test_outlier_tokens_are_named_where_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    with normkit.record(model, every=1) as rows:
        for factor in (1, 1000):
            x = torch.randn(4, 64, 8)
            x[:, 3] *= factor
            model(x)
    for step, where in ((1, []), (2, [("1",)])):  # behind the norm all tokens are of one size again
        found = diagnose(row for row in rows if row.step == step)
        assert [finding.where for finding in found if finding.kind == "outlier tokens"] == where
    named = {row.quantity: row.value for row in rows if row.step == 2 and row.site == "1"}
    assert named["largest_token_place"] == 3
    assert 500 < named["largest_token"] < 5000


def test_too_little_to_judge_by():
    """Running statistics still show their initial values before 20 steps."""
    few = [Row(step, "", "", "loss", 5.0) for step in (1, 50)]
    assert "100 steps" in unchecked(few), "how many steps a check takes"
    young = [Row(step, "a", "BatchNorm1d", "gap_batch", 2.0) for step in range(1, 12)]
    assert kinds(young) == []
    assert "evaluation" in unchecked(young)
    assert kinds([*young, Row(20, "a", "BatchNorm1d", "gap_batch", 2.0)]) == ["evaluation"]
    rows = [Row(step, "", "", "gradient_norm", 1.0) for step in range(9)]
    assert diagnose(rows).checked == ["gradient spikes"]


def test_losses_that_came_back_from_a_peak_or_have_one_class():
    def rows(losses, constant):
        for step, loss in enumerate(losses):
            yield from (Row(8 * step + 1, "", "", name, v) for name, v in (("loss", loss), ("constant_loss", constant)))

    risen = [5.7, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 3.6, 3.2]
    assert kinds(rows(risen, 3.06)) == ["loss"]
    assert kinds(rows(risen, 4.2)) == [], "it has learned something meanwhile"
    assert kinds(rows([min(loss, 6.0) for loss in risen], 3.06)) == []
    assert kinds(rows([0.1 / (1 + step) for step in range(15)], 0.0)) == ["loss"]
    assert kinds(rows([5.5, 3.3, 3.3, 3.5, 3.9, 4.4, 4.8, 5.0, 4.9, 4.8, 4.6, 4.4, 4.2, 4.1, 3.9], 3.2)) == ["loss"]
    assert kinds(rows([4e9 - 1e8 * step for step in range(15)], 2.3)) == ["loss"], "falls, and is far above"
    young = diagnose(rows([6.0 - 0.1 * step for step in range(15)], 4.2))
    assert [(each.kind, each.evidence["loss"]) for each in young if each.evidence] == [(NOT_CHECKED, 4.6)]
    continued = [2.257, 2.36, 2.3, 2.4, 2.31, 2.36, 2.34, 2.35]
    assert kinds(rows(continued * 2, 3.27)) == [], "a model that was trained before"
    assert kinds(rows(continued * 2, 2.4)) == ["loss"]
    assert kinds(rows([*continued, *(2.8 + 0.1 * step for step in range(8))], 3.27)) == ["loss"]
    assert "constant prediction" in unchecked(Row(step, "", "", "loss", 9.0 / step) for step in range(1, 101, 9))


def test_a_norm_whose_gain_stays_zero_passes_nothing_on():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[0].weight[:1])
    found = []
    for rate in (0.0, 0.1):
        optimizer = torch.optim.SGD(model.parameters(), rate)
        with watch.record(model, every=1) as rows:
            for _ in range(4):
                (model(torch.randn(8, 4)) - 1).square().sum().backward()
                optimizer.step()
        found.append([(finding.kind, finding.where) for finding in diagnose(rows) if finding.kind == "zero gain"])
    assert found == [[("zero gain", ("0", "2"))], []]


def test_activations_that_died_behind_a_norm_are_found():
    """A next layer that starts at zero gives no gradient in the first step alone."""
    torch.manual_seed(0)
    found = []
    for bias, start in ((-100.0, 1.0), (0.0, 0.0)):
        model = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16))
        with torch.no_grad():
            model[0].bias[:4] = bias
            model[2].weight *= start
        rows = fit(model, [torch.randn(32, 16) for _ in range(6)])
        found.append([each.evidence for each in faults(rows) if each.kind == "dead channels"])
    assert found == [[{"0": 0.25}], []]


def test_rows_and_files_of_rows_are_diagnosed_and_nothing_else(tmp_path):
    watch.write(tmp_path / "rows.csv", rows := [Row(1, "norm", "batch", "padding", 0.3)])
    assert diagnose(tmp_path / "rows.csv") == diagnose(str(tmp_path)) == diagnose(rows)
    for given, error in ((nn.LayerNorm(3), TypeError), ([1, 2], TypeError), ([], ValueError), ("no.csv", ValueError)):
        with pytest.raises(error, match="rows"):
            diagnose(given)
