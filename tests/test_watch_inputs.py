"""Inputs that are rare in training do not disturb a recording."""

import copy

import pytest
import torch
from torch import nn
from torchvision_stub import load_torchvision

import normkit
from normkit.watch import Recorder, diagnose, record


def gaps(batches, norm=None):
    """The last recorded gap of quadratic means."""
    norm = norm or nn.LayerNorm(4)
    with record(norm, every=1) as rows:
        for x, *mask in batches:
            norm(x, *mask).sum().backward()
    return [row.value for row in rows if row.quantity == "gap_quadratic"]


@pytest.mark.parametrize("shape", [(0, 4), (0, 3, 4), (4,), (2, 0, 4)])
def test_no_token_and_a_single_one(shape):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1) as rows:
        for x in (torch.randn(shape), torch.randn(3, 4)):
            model(x).sum().backward()
    assert {row.step for row in rows if row.quantity == "rms"} >= {2}


def test_a_model_may_change_its_type_and_pass_a_batch_in_inference_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1, quantities="all") as rows:
        with torch.inference_mode():
            model(torch.randn(3, 4))
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)(torch.randn(3, 4, dtype=dtype)).square().sum().backward()
    assert [row.step for row in rows if row.quantity == "gap_batch"] == [2, 3, 4]


def test_forwards_under_functional_transforms_are_not_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1, quantities=["rms"]) as rows:
        model(torch.randn(3, 4))
        torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(torch.randn(5, 3, 4))
        model(torch.randn(3, 4))
    assert [row.step for row in rows] == [1, 3]


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.LayerNorm(4))
    with record(model, quantities=["gradient_norm"], every=1) as rows:
        model(torch.tensor([[1, 2, 2]])).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad.to_dense() for p in model.parameters()])
    assert [row.value for row in rows] == [pytest.approx(float(expected))]


def test_a_first_batch_that_is_not_finite_or_all_padding_is_forgotten():
    torch.manual_seed(0)
    batches = [(torch.randn(64, 4),) for _ in range(6)]
    clean = gaps(batches)
    assert gaps([(torch.full((64, 4), torch.nan),), *batches])[-4:] == pytest.approx(clean[-4:], rel=0.5)
    real = [(x, torch.ones(64, dtype=torch.bool)) for (x,) in batches]
    padding = (torch.randn(64, 4), torch.zeros(64, dtype=torch.bool))
    masked = gaps([padding, *real], normkit.make("layer", 4))
    assert masked[-4:] == pytest.approx(clean[-4:], rel=0.5)


def test_a_copy_of_the_model_is_not_recorded():
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6), normkit.make("un", 6))
    with record(model, every=1) as rows:
        for forward in (model, copied := copy.deepcopy(model), model, torch.compile(copied, backend="eager")):
            forward(torch.tensor([[3, 4], [5, 0]])).sum().backward()
    assert {row.step for row in rows} == {1, 2}


class VectorNorm(nn.Module):
    def forward(self, x):
        return x.norm(dim=-1)


class AddNorm(nn.Module):
    def forward(self, pair):
        return sum(pair)


class ComplexNorm(nn.Module):
    def forward(self, x):
        return (x * 1j).abs()


@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (nn.LocalResponseNorm(2), [(2, 3, 6, 6), (2, 3, 8, 8)]),
        (nn.InstanceNorm2d(5, affine=True), [(5, 6, 6), (2, 5, 6, 6)]),
        (VectorNorm(), [(2, 8, 4)] * 2),
        (ComplexNorm(), [(2, 4), (2, 6)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_only_called_a_norm_does_not_end_a_training(norm, shapes):
    model = nn.Sequential(norm)
    with record(model, every=1, quantities="all") as rows:
        for shape in shapes:
            model(torch.randn(shape, requires_grad=True)).sum().backward()
    if isinstance(norm, nn.LocalResponseNorm):
        assert [row.value for row in rows if row.quantity == "tokens"] == [2 * 6 * 6, 2 * 8 * 8]


def test_a_norm_of_several_tensors():
    model = AddNorm()
    with record(nn.ModuleList([model, nn.LayerNorm(4)]), every=1):
        model((torch.randn(2, 4), torch.randn(2, 4)))


def test_gradients_of_half_precision_do_not_overflow():
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).half()
    with record(model, every=1, quantities=["gradient_norm"]) as rows:
        (model(torch.randn(4, 256).half()) * 1500).sum().backward()
    total = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    assert [row.value for row in rows] == [pytest.approx(float(total), rel=1e-3)]
    assert total > torch.finfo(torch.float16).max


class Masked(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x, attention_mask=None):
        return self.norm(x)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_masks_among_the_arguments_count_in_wrapped_models(wrap):
    model, mask = wrap(Masked()), torch.tensor([[True] * 3 + [False] * 3] * 2)
    with record(model, every=1, quantities=["tokens"]) as rows:
        model(torch.randn(2, 6, 4), mask).sum().backward()
        model(torch.randn(2, 6, 4), attention_mask=mask.long()).sum().backward()
    assert [row.value for row in rows] == [6, 6]


def test_a_compiled_model_may_change_the_output_of_a_norm_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    compiled, seen = torch.compile(copy.deepcopy(model), backend="aot_eager"), []
    x = torch.randn(8, 4)
    for each in (model, compiled):
        with record(each, every=1, quantities=["gradient_norm", "rms"]) as rows:
            each(x).square().mean().backward()
        seen.append([row.value for row in rows])
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_a_model_can_be_saved_while_it_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), normkit.make("un", 4))
    with record(model, every=1) as rows:
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        again(torch.randn(3, 4)).sum().backward()
    assert not list(rows)


def test_frozen_statistics_do_not_fail_at_evaluation():
    """A norm with constant statistics, as those of detectors, is judged as one without any."""
    frozen = load_torchvision().ops.FrozenBatchNorm2d(4)
    frozen.running_var.fill_(0.01)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), frozen)
    with record(model, every=1) as rows:
        for step in range(30):
            model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)))
    assert "evaluation" not in [finding.kind for finding in diagnose(rows)]


def test_without_running_statistics_nothing_fails_at_evaluation():
    found = {}
    for track in (True, False):
        model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=track))
        with record(model, every=1) as rows:
            for step in range(30):
                model((1 + step) * torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
        found[track] = {finding.kind for finding in diagnose(rows)}
    assert found[True] - found[False] == {"evaluation"}
    assert "tiny batches" in found[False]


def test_masks_of_past_steps_are_freed():
    """Also in a loop that counts the steps itself, as the Lightning callback does."""
    model = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.LayerNorm(2))
    recorder = Recorder(model, 1, "length")
    for ids in ([[1, 0]], [[1, 2]], [[0, 0]]):
        recorder.begin_step()
        model(torch.tensor(ids))
        recorder.end_forward()
    assert [row.value for row in recorder.rows] == [1, 2, 0]
    assert len(recorder.padding.real) == 1
    recorder.close()


def test_a_gradient_has_the_mask_of_its_own_forward():
    """Two forwards come before the first backward pass."""
    model, x, found = Masked(6), torch.randn(2, 3, 6), []
    masks = [torch.tensor(rows) for rows in ([[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]])]
    for together in (False, True):
        with record(model, every=1, quantities=["g_psi2"]) as rows:
            losses = []
            for mask in masks:
                losses.append((model(x, mask) * torch.arange(6.0).view(2, 3, 1)).sum())
                if not together:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
        found.append([row.value for row in rows])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("masked", [True, False])
def test_lengths_where_time_comes_first(masked):
    real = torch.arange(10) < torch.tensor([10, 5, 5, 4])[:, None]
    found = []
    for first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=first)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        x = torch.randn(4, 10, 8) if first else torch.randn(10, 4, 8)
        with record(model, quantities="length", every=1) as rows:
            model(x, src_key_padding_mask=~real if masked else None)
        found.append({row.value for row in rows if row.quantity == "length"})
    assert found == [{6.0}, {6.0}] if masked else [{10.0}, {10.0}]
