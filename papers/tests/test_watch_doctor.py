"""Runs made to fail get the finding that names the fault; a healthy run gets none."""

import pytest
import torch
from torch import nn

import normkit
from normkit.watch import NOT_CHECKED, THRESHOLDS, Row, advise, checked, diagnose, train_eval_gap
from normkit.watch.diagnose import CHECKS
from normkit.watch.row_names import format_sites


def sample(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def fit(model, batches, lr=1e-3, every=1, **options):
    """Train a model to reproduce its input; its rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    with normkit.record(model, every=every, **options) as rows:
        for x in batches:
            optimizer.zero_grad()
            y = model(x)
            loss = (y - x).square().mean() if y.shape == x.shape else y.square().mean()
            loss.backward()
            optimizer.step()
    return list(rows)


def mlp(*norms, width=16):
    torch.manual_seed(0)
    parts = [part for norm in norms for part in (normkit.make(norm, width), nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(width, width))


def wrong(rows):
    return [finding for finding in diagnose(rows) if finding.kind != NOT_CHECKED]


def kinds(rows):
    return [finding.kind for finding in wrong(rows)]


def unchecked(rows):
    return [finding.message for finding in diagnose(rows) if finding.kind == NOT_CHECKED]


@pytest.mark.parametrize("norm", ["layer", "batch", "pnv", "power(groups=0, warmup=5)", "un(warmup=8)"])
def test_a_healthy_run_has_no_findings(norm):
    rows = fit(mlp(norm, norm, norm), [sample(step, 4, 32, 16) for step in range(60)], every=2)
    assert wrong(rows) == []
    if norm == "layer":
        assert unchecked(rows) == []
        [line] = advise(rows)
        assert line.startswith("0, 3, 6: BatchNorm would be off by")
        assert line.endswith("; all three would hold")


def test_batches_unlike_each_other_in_their_means():
    """Each batch has another mean: only the quadratic mean represents them."""

    def batches():
        return [sample(step, 64, 16) * 0.3 + torch.where(sample(step + 500, 16) > 0, 1.0, -1.0) for step in range(60)]

    [finding] = wrong(fit(nn.Sequential(normkit.make("batch", 16)), batches()))
    assert finding.kind == "evaluation"
    assert finding.where == ("0",)
    assert "BatchNorm will fail at evaluation here" in finding.message
    assert finding.advice == "PN-V or UN will hold"
    assert "quadratic mean is 1." in finding.message
    assert finding.evidence["0"] > THRESHOLDS["gap"].value
    assert kinds(fit(nn.Sequential(normkit.make("pnv", 16)), batches())) == []
    [line] = advise(fit(nn.Sequential(nn.LayerNorm(16)), batches()))
    assert line.startswith("0: BatchNorm would be off by")


def test_batches_unlike_each_other_in_size():
    batches = [sample(step, 64, 16) * (30.0 if step % 2 else 1.0) for step in range(60)]
    for norm, words in (("batch", "use a per-token norm"), ("pnv", "quadratic mean is")):
        found = [f for f in diagnose(fit(nn.Sequential(normkit.make(norm, 16)), batches)) if f.kind == "evaluation"]
        assert len(found) == 1
        assert words in str(found[0])


def test_statistics_that_carry_the_length_of_the_batch():
    def found(norm, weight):
        lengths = [3 + 7 * step % 5 for step in range(60)]
        batches = [sample(step, 32, length, 16) + weight * length for step, length in enumerate(lengths)]
        return "batch length" in kinds(fit(nn.Sequential(normkit.make(norm, 16)), batches))

    assert found("batch", 0.1)
    assert found("pnv", 0.1)
    assert not found("batch", 0.0)
    assert not found("un(warmup=8)", 0.1), "it divides by past batches"


class Padded(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.out = nn.Embedding(50, 16, padding_idx=0), norm, nn.Linear(16, 4)

    def forward(self, ids, mask):
        return self.out(self.norm(self.embed(ids), mask))


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_no_mask_hides(masked):
    model = Padded(normkit.make("pnv", 16))
    with normkit.record(model, every=1) as rows:
        for step in range(20):
            ids = torch.randint(1, 50, (8, 20), generator=torch.Generator().manual_seed(step))
            ids[:, 12:] = 0
            model(ids, ids != 0 if masked else None).square().mean().backward()
    found = wrong(rows)
    if masked:
        assert found == []
    else:
        assert [finding.kind for finding in found] == ["padding"]
        assert "40 % of the rows" in found[0].message


@pytest.mark.parametrize("spec", ["pnv", "layer"])
def test_a_few_large_tokens_decide_the_statistics_of_channels(spec):
    def batch(step):
        x = sample(step, 64, 8)
        return torch.where(torch.arange(64)[:, None] % 32 == 0, 30 * x, x)

    found = wrong(fit(nn.Sequential(normkit.make(spec, 8), nn.Linear(8, 8)), [batch(step) for step in range(20)]))
    shares = [finding.evidence["0"] for finding in found if finding.kind == "large tokens"]
    assert shares == ([pytest.approx(2 / 64, rel=0.3)] if spec == "pnv" else [])


def test_tiny_batches():
    rows = fit(mlp("batch", "batch"), [sample(step, 4, 16) for step in range(40)])
    assert "tiny batches" in kinds(rows)
    assert "batches of 4 rows" in str(diagnose(rows)[0])
    assert "tiny batches" not in kinds(fit(mlp("layer"), [sample(step, 4, 16) for step in range(40)])), "no statistics"


class Deep(nn.Module):
    """Residual branches of full size, twelve of them, nothing before the sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(12))
        self.lines = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(12))
        for line in self.lines:
            nn.init.orthogonal_(line.weight, 1.5)

    def forward(self, x):
        for norm, line in zip(self.norms, self.lines, strict=True):
            norm(x)
            x = x + line(x)
        return x


def test_exploding_depth():
    found = wrong(fit(Deep(), [sample(step, 64, 16) for step in range(20)], lr=1e-6))
    assert [finding.kind for finding in found] == ["exploding depth"]
    assert found[0].where == ("norms.11",)


def test_a_run_that_explodes():
    model = mlp("layer", "layer")
    batches = [sample(step, 64, 16) * 1.5 ** min(step, 20) for step in range(40)]
    assert "exploding" in kinds(fit(model, batches, lr=1e-6))


def test_values_that_float16_cannot_hold():
    assert kinds(fit(mlp("layer"), [sample(step, 64, 16) * 1e5 for step in range(10)], lr=1e-9)) == ["large values"]


@pytest.mark.parametrize("norm", ["un(warmup=4)", "layer"])
def test_a_nan_batch(norm):
    batches = [sample(step, 64, 16) for step in range(20)]
    batches[10][3, 2] = torch.nan
    model = nn.Sequential(normkit.make(norm, 16))
    with normkit.record(model, every=1) as rows:
        for x in batches:
            model(x).square().mean().backward()
    found = wrong(rows)
    assert {finding.kind for finding in found} == {"nan"}
    assert any("step 11" in str(finding) for finding in found)
    if norm != "layer":
        assert "1 forwards were not finite" in str(found[0])


def test_running_statistics_that_a_nan_batch_has_corrupted():
    """The step is skipped, as a loss scaler does; PyTorch's BatchNorm keeps NaN for good."""
    model = nn.Sequential(nn.BatchNorm1d(16))
    with normkit.record(model, every=3) as rows:
        for step in range(31):
            model(sample(step, 64, 16) * (torch.nan if step == 13 else 1)).square().mean().backward()
    [finding] = wrong(rows)
    assert (finding.kind, finding.where) == ("nan", ("0",))
    assert "running statistics are not finite" in finding.message


def test_dead_channels():
    model = mlp("layer", "layer")
    with torch.no_grad():
        model[0].weight[:4] = 0  # of the second norm's input, after GELU, these are exactly zero
        model[0].bias[:4] = 0
        model[1].weight[:4] = 0
        model[1].bias[:4] = 0
    rows = fit(model, [sample(step, 64, 16) for step in range(10)], lr=1e-12)
    [finding] = wrong(rows)
    assert (finding.kind, finding.where) == ("dead channels", ("3",))
    assert "25 % of the channels" in finding.message


def test_nu_beyond_its_bound():
    """psi_B^2 grows by q = 4 a step: Gamma goes to (q - .9) / .1 = 31, above its bound."""
    norm = normkit.make("power(groups=0, warmup=2)", 16).double()
    with normkit.record(norm, every=1) as rows:
        for step in range(40):
            x = sample(0, 64, 16).double() * 2.0**step
            norm(x).backward(sample(1, 64, 16).double())
    finding = next(finding for finding in diagnose(rows) if finding.kind == "nu")
    assert "nu exceeds its bound" in finding.message
    assert "raise alpha_bkw" in finding.advice


def test_un_that_filters_every_step():
    batches = [sample(step, 64, 16) * (1 + 0.3 * float(sample(step + 900, 1))) for step in range(80)]
    norm = "un(warmup=5, outlier_filtration=True, threshold='channel')"
    finding = next(f for f in diagnose(fit(mlp(norm), batches)) if f.kind == "filtered")
    assert "% of steps: it is PN-V now" in finding.message


def test_gradient_spikes():
    model = mlp("layer")
    with normkit.record(model, every=1) as rows:
        for step in range(40):
            model.zero_grad()
            (model(sample(step, 64, 16)).square().mean() * (1000 if step == 30 else 1)).backward()
    assert kinds(rows) == ["gradient spikes"]


def test_loss_that_evaluation_loses():
    model, x = normkit.make("batch", 4), sample(0, 64, 4) * 5 + 3
    train, evaluation = train_eval_gap(model, lambda: model(x).square().mean())
    assert model.training
    assert not model.step
    rows = [Row(1, "", "", "loss_train_mode", train), Row(1, "", "", "loss_eval_mode", evaluation)]
    [finding] = wrong(rows)
    assert finding.kind == "train-to-eval gap"
    rows[1] = rows[1]._replace(value=train * 1.01)
    assert wrong(rows) == []


def test_sites_are_listed_in_few_words():
    assert (
        format_sites([f"encoder.layers.{i}.norm" for i in (0, 1, 2, 4)])
        == "encoder.layers.0-2.norm, encoder.layers.4.norm"
    )
    assert format_sites([""]) == "the model"
    assert format_sites(f"norm{c}" for c in "abcdefgh").endswith(", 2 more")


NORMS = {"batch": "batch", "un": "un(outlier_filtration=True)", "power": "power", "layer": "layer"}


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


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_large_first_tokens_are_found_before_a_norm_is_replaced(norm):
    model = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 8), norm(8))
    with normkit.record(model, every=1) as rows:
        for first in (1, 1, 1000):
            x = torch.randn(4, 64, 8)
            x[:, 0] *= first
            model(x)
    for step in (1, 2, 3):
        found = diagnose(row for row in rows if row.step == step)
        where = [finding.where for finding in found if finding.kind == "outlier tokens"]
        assert where == ([("1",)] if step == 3 else []), "behind the norm all tokens are of one size again"


def healthy(steps=60):
    """Rows with all that checks need and nothing wrong in them."""
    calm = {"Gamma_bound": 20.0, "tokens": 900.0, "padding": 0.0, "nonfinite": 0.0, "dead": 0.0, "filtered_rate": 0.0}
    calm |= {"warmup_left": 0.0, "token_share": 0.8}
    names = sorted({name for check in CHECKS for name in check.needs.split()})
    whole = [name for name in names if name.startswith(("loss", "gradient"))]
    for step in range(1, steps + 1, max(1, steps // 6)):
        yield from (Row(step, "", "", name, 1.0) for name in whole)
        for site, norm in NORMS.items():
            yield from (Row(step, site, norm, name, calm.get(name, 0.1)) for name in names if name not in whole)


def test_complete_and_healthy_rows_have_no_findings():
    assert diagnose(healthy()) == []
    assert diagnose(row._replace(value=0.0) if row.quantity == "Gamma_bound" else row for row in healthy()) == []
    assert checked(healthy()) == list(dict.fromkeys(check.kind for check in CHECKS))


def test_too_little_to_judge_by():
    assert "evaluation" in " ".join(unchecked(healthy(steps=12)))
    young = [Row(step, "a", "BatchNorm1d", "gap_batch", 2.0) for step in range(1, 12)]
    assert kinds(young) == []
    assert kinds([*young, Row(20, "a", "BatchNorm1d", "gap_batch", 2.0)]) == ["evaluation"], (
        "the running ones are old enough"
    )


def test_optional_quantities_are_left_out_of_the_message():
    [finding] = wrong([Row(step, "a", "BatchNorm1d", "gap_batch", 0.9) for step in (1, 30, 60)])
    assert "nan" not in str(finding)


def test_no_rows():
    with pytest.raises(ValueError, match="there are no rows to judge"):
        diagnose([])


@pytest.mark.parametrize("given", [nn.Sequential(nn.LayerNorm(3)), nn.LayerNorm(3), "rows.csv", [1, 2]])
def test_anything_but_rows_is_rejected(given):
    with pytest.raises(TypeError, match=r"a recording consists of rows, as normkit\.record gives them; got"):
        diagnose(given)


def test_rows_of_no_norm_let_almost_nothing_be_checked():
    rows = [Row(step, "", "", "gradient_norm", 1.0) for step in range(9)]
    assert checked(rows) == ["gradient spikes"]
    kinds = {check.kind for check in CHECKS} - {"gradient spikes"}
    assert all(any(kind in found for found in unchecked(rows)) for kind in kinds)
