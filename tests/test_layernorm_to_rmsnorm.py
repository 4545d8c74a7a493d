"""LayerNorm to RMSNorm: exact where only LayerNorms read a residual stream.

Refused where a mean would be noticed.
"""

import pytest
import torch
from small_models import built
from third_party_models import case_of, randomize, tokens
from torch import Tensor, nn

from normkit.fold import fold, to_rms
from normkit.norms import RMSNorm, make

DIM = 6
RMS = {"gpt2": "5 of 5", "hf_vit": "5 of 5", "bert": "1 of 6", "hf_swin": "4 of 7", "torch_encoder_pre": "0 of 5"}


def converted(report) -> str:
    return f"{report.count('rms')} of {len(report)}"


@pytest.mark.parametrize("name", RMS)
def test_third_party_pre_norm_models_lose_their_centring(name):
    case = case_of(name)
    before = {key: t.clone() for key, t in case.model.state_dict().items()}
    model, report = to_rms(case.model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)
    assert converted(report) == RMS[name], str(report)
    assert report.max_error < 1e-12
    assert report.native_error < 1e-5
    for row in report:
        assert isinstance(model.get_submodule(row.name), RMSNorm) == (row.action == "rms")
        assert (row.action == "rms") != bool(row.why)
    for key, t in case.model.state_dict().items():
        assert torch.equal(t, before[key])
    assert set(case.model.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize(("transform", "norm"), [(to_rms, nn.LayerNorm(DIM)), (fold, make("batch", DIM))])
def test_positions_in_a_buffer_take_the_change_and_are_saved(transform, norm):
    positions = nn.Buffer(torch.randn(9, DIM), persistent=False)
    model = built(lambda m, ids: torch.tanh(m.norm(m.embedding(ids) + m.positions[: ids.shape[1]])),
                  embedding=nn.Embedding(50, DIM), positions=positions, norm=norm)  # fmt: skip
    model = randomize(model).eval()
    done, report = transform(model, tokens(2, 7))
    assert {row.action for row in report} <= {"rms", "folded back"}
    assert "positions" in done.state_dict()
    torch.testing.assert_close(done(tokens(2, 9)), model(tokens(2, 9)), rtol=1e-4, atol=1e-5)


class Stream(nn.Module):
    """Embedding, a block in a residual, a final norm; `also` is what else reads the stream."""

    def __init__(self, also=None, gamma: Tensor | float = 1.0):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(50, DIM), nn.Parameter(torch.randn(1, 9, DIM))
        self.norm, self.out, self.final = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.head, self.also, self.gamma = nn.Linear(DIM, 4), also, gamma

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * 3.0 + self.positions[:, : ids.shape[1]]
        x = x + self.gamma * self.out(torch.tanh(self.norm(x)))
        y = self.head(self.final(x))
        return y if self.also is None else y + self.also(self, x)


def test_the_writers_write_no_mean_any_more():
    model = randomize(Stream()).eval()
    done, report = to_rms(model, tokens(2, 7))
    assert converted(report) == "2 of 2"
    for t in (done.embedding.weight, done.positions, done.out.weight.T, done.out.bias):
        torch.testing.assert_close(t.mean(-1), torch.zeros_like(t.mean(-1)), rtol=0, atol=1e-6)
    assert torch.equal(done.head.weight, model.head.weight)
    assert torch.equal(done.norm.weight, model.norm.weight)
    assert set(report.rows[0].into) == {"embedding", "positions", "out"}


@pytest.mark.parametrize(
    ("also", "why"),
    [
        (lambda m, x: x.mean(), "aten.mean"),
        (lambda m, x: m.head(x), "head.weight"),
        (lambda m, x: torch.nn.functional.rms_norm(x, (DIM,)).sum(), ""),
        (lambda m, x: m.out.weight.sum(), "out.weight"),
        (lambda m, x: m.out.bias.sum(), "out.bias"),
        (lambda m, x: m.final(torch.ones_like(x) + x).sum(), ""),
    ],
)
def test_a_reader_that_depends_on_the_mean_keeps_the_layer_norm(also, why):
    model = randomize(Stream(also)).eval()
    done, report = to_rms(model, tokens(2, 7))
    assert converted(report) == "0 of 2"
    assert any(why in row.why for row in report), str(report)
    assert torch.equal(done.out.weight, model.out.weight)


def test_a_stream_that_a_layer_scale_writes_keeps_its_mean():
    _, report = to_rms(randomize(Stream(gamma=nn.Parameter(torch.rand(DIM) + 0.5))).eval(), tokens(2, 7))
    assert converted(report) == "0 of 2"
    assert "gamma" in report.rows[0].why


def test_without_a_layer_norm_and_bad_input():
    with pytest.raises(ValueError, match="LayerNorm"):
        to_rms(nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3, eps=1e-5)).eval(), torch.randn(2, 3))
    with pytest.raises(ValueError, match="training mode"):
        to_rms(nn.Sequential(nn.LayerNorm(3)), torch.randn(2, 3))
    _, report = to_rms(nn.Sequential(nn.LayerNorm(3)).eval(), torch.randn(2, 4, 3))
    assert "input" in report.rows[0].why
