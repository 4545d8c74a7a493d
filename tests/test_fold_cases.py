"""Folding as a change of coordinates: each kind of model and each trap once."""

from functools import partial

import pytest
import torch
from fold_cases import DIM, check
from small_models import built
from third_party_models import randomize, tokens
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models.affine import Affine
from normkit.norms import make


class Post(nn.Module):
    """A post-norm stack between an embedding and a head, tied or not.

    `also` is something else that reads it.
    """

    def __init__(self, depth: int = 3, tie: bool = False, spec: str = "batch", also=None, shared: bool = False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(20, DIM), nn.Embedding(9, DIM)
        self.norms = nn.ModuleList([make(spec, DIM) for _ in range(depth)])
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(1 if shared else depth)])
        self.outs = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(1 if shared else depth)])
        self.head, self.also = nn.Linear(DIM, 20, bias=False), also
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for k, norm in enumerate(self.norms):
            layer, out = self.layers[k % len(self.layers)], self.outs[k % len(self.outs)]
            x = norm(x + out(torch.tanh(layer(x))))
            if self.also is not None:
                x = x + self.also(self, x)
        return self.head(x)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("spec", ["batch", "un"])
def test_a_post_norm_stack_folds_whole_and_stays_tied(tie, spec):
    folded, report = check(Post(tie=tie, spec=spec), tokens(2, 5, high=20), actions="folded, folded, folded")
    assert (folded.head.weight is folded.embedding.weight) == tie
    assert (folded.head.bias is None) == tie, "a tied head reads no shift, a layer before it takes that"
    assert report.largest_factor > 1
    assert set(report.rows[1].into) >= {"layers.2", "outs.1"}, "both ends of a stream that was rescaled"


def with_gains(model: Post, norm: int, channels: dict[int, float]) -> Post:
    """The model, with other gains at some channels of a norm."""
    model = randomize(model)
    with torch.no_grad():
        for channel, gain in channels.items():
            model.norms[norm].weight[channel] = gain
    return model.eval()


def folded_exactly(model: nn.Module, *example, **options):
    """Fold a model as it is; the folded model and the report."""
    folded, report = fold(model, *example, **options)
    assert report.max_error < 1e-11, str(report)
    with torch.no_grad():
        torch.testing.assert_close(folded(*example), model(*example), rtol=1e-3, atol=1e-4)
    return folded, report


def test_negative_gains_pass_but_not_a_tie():
    ids = tokens(2, 5, high=20)
    _, report = folded_exactly(with_gains(Post(), 1, {0: -0.8, 3: -1.2}), ids)
    assert report.foldable == "3 of 3"
    _, report = folded_exactly(with_gains(Post(tie=True), 1, {0: -0.8}), ids)
    assert report.foldable == "2 of 3", "the root of a negative number"
    assert sum("tied" in row.why for row in report) == 1


@pytest.mark.parametrize("gain", [0.0, 1e-9])
def test_a_gain_of_zero_passes_where_nothing_divides_by_it(gain):
    ids = tokens(2, 5, high=20)
    _, report = folded_exactly(with_gains(Post(), 2, {1: gain}), ids)
    assert report.foldable == "3 of 3", "only the head reads the last norm"
    _, report = folded_exactly(with_gains(Post(), 1, {1: gain, 2: gain}), ids)
    assert [row.action for row in report] == ["folded", "multiply-add", "folded"]
    assert "2 of 6" in report.rows[1].why
    _, report = folded_exactly(with_gains(Post(tie=True), 2, {1: gain}), ids)
    assert report.rows[2].action == "multiply-add"
    assert report.largest_factor < 1e3


def test_layers_used_at_several_depths():
    shared = Post(depth=1, shared=True)
    shared.norms = nn.ModuleList([shared.norms[0]] * 2)
    _, report = check(shared, tokens(2, 5, high=20))
    assert len(report) == 1
    assert report.rows[0].action == "multiply-add", "its input and its output are one channel to the shared layer"


def test_a_stream_that_something_nonlinear_reads_keeps_one_norm_between_two_readers():
    model = Post(also=lambda m, x: torch.sigmoid(x))
    _, report = check(model, tokens(2, 5, high=20))
    assert report.count("multiply-add") == 2, "the first folds back into the embeddings"
    assert all("sigmoid" in row.why for row in report if row.action == "multiply-add")


def test_a_parameter_per_channel_that_something_else_reads_passes_scales_on():
    """As LayerScale in the branch of a post-norm stream."""

    def forward(m, ids):
        x = m.first(m.embedding(ids))
        x = m.second(x + m.gamma * m.out(torch.tanh(m.layer(x))))
        return m.head(x) * m.gamma.sum()

    model = built(
        forward, embedding=nn.Embedding(20, DIM), first=make("batch", DIM), layer=nn.Linear(DIM, DIM),
        out=nn.Linear(DIM, DIM), gamma=nn.Parameter(torch.rand(DIM) + 0.5), second=make("batch", DIM),
        head=nn.Linear(DIM, 4),
    )  # fmt: skip
    check(model, tokens(2, 5, high=20), actions="folded, folded")


@pytest.mark.parametrize("counted", [False, True])
def test_linear_pooling_is_followed(counted):
    """PoolFormer's mixer, `pool(x) - x`, with padding that counts or not."""

    def forward(m, x):
        x = m.stem(x)
        y = m.first(x)
        return m.head(m.second(x + m.gamma * (m.pool(y) - y)))

    model = built(
        forward, stem=nn.Conv2d(3, DIM, 1), first=nn.BatchNorm2d(DIM), second=nn.BatchNorm2d(DIM),
        pool=nn.AvgPool2d(3, 1, 1, count_include_pad=counted), head=nn.Conv2d(DIM, 4, 1),
        gamma=nn.Parameter(torch.rand(DIM, 1, 1) + 0.5),
    )  # fmt: skip
    _, report = check(model, torch.randn(2, 3, 8, 8), actions="folded, folded")
    assert not report.rows[0].why


def written(y: Tensor, mask: Tensor) -> Tensor:
    """Rows where a mask is not 0, written into zeros."""
    rows = torch.zeros_like(y)
    rows[mask > 0] = y[mask > 0]
    return rows


@pytest.mark.parametrize("masked", [lambda y, mask: y * mask[..., None], written])
def test_a_mask_that_multiplies_or_selects_passes_gains_and_no_shift(masked):
    def model(spec: str) -> nn.Module:
        return built(lambda m, x, mask: m.head(masked(m.norm(torch.tanh(x)), mask)),
                     norm=make(spec, DIM), head=nn.Linear(DIM, 4))  # fmt: skip

    example = torch.randn(2, 5, DIM), (torch.arange(10).view(2, 5) % 3 > 0).float()
    _, report = check(model("batch"), *example, actions="add")
    assert "mask" in report.rows[0].why
    check(model("un(bias=False)"), *example, actions="folded")


@pytest.mark.parametrize("norm", [nn.LayerNorm, partial(make, "layer"), partial(make, "dyt")])
def test_a_norm_of_tokens_takes_the_coordinate_of_a_frozen_one_behind_it(norm):
    model = nn.Sequential(norm(DIM), make("batch", DIM), nn.Tanh())
    _, report = check(model, torch.randn(3, 5, DIM), actions="gain changed, folded back")
    assert report.rows[1].into == ("0",)


def test_a_norm_that_returns_its_input_is_not_taken_for_what_wrote_it():
    def forward(m, x):
        x = m.write(torch.tanh(x))
        return x + torch.tanh(m.layer(m.norm(x)))

    model = built(forward, write=make("batch", DIM), layer=nn.Linear(DIM, DIM), norm=make("nonorm", DIM))
    check(model, torch.randn(3, 5, DIM), actions="multiply-add, folded")


def test_multiply_adds_leave_each_norm_as_one_and_no_factor_in_a_weight():
    model, ids = Post(depth=4), tokens(2, 5, high=20)
    folded, report = check(model, ids, actions=", ".join(["multiply-add"] * 4), multiply_adds=True)
    assert report.largest_factor == 1
    assert all(isinstance(norm, Affine) for norm in folded.norms)
