"""Folding as a change of coordinates.

Each kind of model and each trap once, exact or refused with its reason.
"""

import dataclasses
from functools import partial

import pytest
import torch
from fold_cases import DIM, check
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.mt import Seq2Seq
from third_party_models import padding, randomize, tokens
from torch import Tensor, nn

from normkit.fold import fold, progress
from normkit.models import convert
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


def positive(model: nn.Module) -> nn.Module:
    return randomize(model).eval()


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
    assert "zero, or nearly so, in 2 of 6 channels" in report.rows[1].why
    _, report = folded_exactly(with_gains(Post(tie=True), 2, {1: gain}), ids)
    assert report.rows[2].action == "multiply-add"
    assert report.largest_factor < 1e3


@pytest.mark.parametrize("gain", [0.0, 1e-9])
def test_a_dead_channel_folds_back_into_its_writer(gain):
    model = randomize(nn.Sequential(nn.Conv2d(3, DIM, 3), nn.BatchNorm2d(DIM), nn.ReLU())).eval()
    with torch.no_grad():
        model[1].weight[2] = gain
    folded, report = folded_exactly(model, torch.randn(2, 3, 7, 7))
    assert report.rows[0].action == "folded back"
    if gain == 0:
        assert not folded[0].weight[2].any()


class ThreeTies(nn.Module):
    """Two inputs and the output share one embedding."""

    def __init__(self):
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(20, DIM), nn.Embedding(20, DIM), nn.Linear(DIM, 20)
        self.target.weight = self.head.weight = self.source.weight
        self.encode, self.decode, self.cross = make("batch", DIM), make("batch", DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encode(self.source(source)).mean(1, keepdim=True).expand(-1, target.shape[1], -1)
        x = self.target(target)
        return self.head(self.decode(x + self.cross(torch.cat([memory, x], -1))))


def test_three_uses_of_one_embedding():
    folded, _ = check(ThreeTies(), tokens(2, 5, high=20), tokens(2, 4, high=20), actions="folded, folded")
    assert folded.head.weight is folded.source.weight
    assert folded.head.weight is folded.target.weight


def test_layers_used_at_several_depths():
    _, report = check(Post(shared=True), tokens(2, 5, high=20))
    assert report.foldable == "1 of 3"
    assert all("for different inputs" in row.why or "all but one" in row.why
               for row in report if row.action != "folded")  # fmt: skip
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


class LayerScale(nn.Module):
    """A post-norm stream with a parameter per channel in its branch.

    Used once, or in two places.
    """

    def __init__(self, twice: bool = False):
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(20, DIM), make("batch", DIM), make("batch", DIM)
        self.layer, self.out, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.gamma, self.twice = nn.Parameter(torch.rand(DIM) + 0.5), twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embedding(ids))
        x = self.second(x + self.gamma * self.out(torch.tanh(self.layer(x))))
        return self.head(x) * (self.gamma.sum() if self.twice else 1.0)


def test_a_parameter_per_channel_takes_the_scales_of_both_of_its_ends():
    model = LayerScale()
    folded, _ = check(model, tokens(2, 5, high=20), actions="folded, folded")
    assert not torch.equal(folded.gamma, model.gamma)
    folded, _ = check(LayerScale(twice=True), tokens(2, 5, high=20), actions="folded, folded")


def test_a_norm_between_two_layers_with_layer_scale_between():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gamma, self.head = make("batch", DIM), nn.Parameter(torch.rand(DIM)), nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gamma * self.norm(torch.tanh(x)))

    check(Between(), torch.randn(3, 5, DIM), actions="folded")


def test_a_dead_channel_stays_where_a_layer_scale_reads_it_too():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm, self.head = nn.Embedding(20, DIM), make("batch", DIM), nn.Linear(DIM, 4)
            self.gamma = nn.Parameter(torch.rand(DIM) + 0.5)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embedding(ids)
            return self.norm(x).tanh(), self.head(self.gamma * x)

    model = randomize(Beside()).eval()
    with torch.no_grad():
        model.norm.weight[2] = 0.0
    _, report = fold(model, tokens(2, 5, high=20))
    assert report.max_error < 1e-12
    assert "its gain is zero" in report.rows[0].why


class Pooling(nn.Module):
    """PoolFormer's mixer, `pool(x) - x`, with padding that counts or not."""

    def __init__(self, counted: bool):
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, DIM, 1), nn.BatchNorm2d(DIM), nn.BatchNorm2d(DIM)
        self.pool, self.head = nn.AvgPool2d(3, 1, 1, count_include_pad=counted), nn.Conv2d(DIM, 4, 1)
        self.gamma = nn.Parameter(torch.rand(DIM, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.first(x)
        return self.head(self.second(x + self.gamma * (self.pool(y) - y)))


@pytest.mark.parametrize("counted", [False, True])
def test_linear_pooling_is_followed(counted):
    _, report = check(Pooling(counted), torch.randn(2, 3, 8, 8), actions="folded, folded")
    assert not report.rows[0].why


def test_resizing_and_sums_over_positions_are_followed():
    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm2d(DIM), nn.Conv2d(DIM, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(torch.tanh(x))
            small = nn.functional.interpolate(y, scale_factor=0.5, mode="bilinear")
            return self.head(nn.functional.interpolate(small, size=y.shape[-2:], mode="bicubic") + y)

    check(Resized(), torch.randn(2, DIM, 8, 8), actions="folded")

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = make("batch", DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(torch.tanh(x)).sum(1))

    check(Summed(), torch.randn(2, 5, DIM), actions="add")  # a sum of n shifts, and n is the length


def test_a_convolution_with_padding_in_a_post_norm_stream_takes_no_shift():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(3, DIM, 1), nn.BatchNorm2d(DIM), nn.BatchNorm2d(DIM)
            self.conv, self.head = nn.Conv2d(DIM, DIM, 3, padding=1), nn.Conv2d(DIM, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.stem(x))
            return self.head(self.second(x + torch.tanh(self.conv(x))))

    _, report = check(Convolutions(), torch.randn(2, 3, 8, 8), actions="folded back, add")
    assert "zero padding" in report.rows[1].why


def test_an_encoder_whose_output_the_caller_reads_too():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(20, DIM), make("batch", DIM)
            self.cross, self.last, self.head = nn.Linear(DIM, DIM), make("batch", DIM), nn.Linear(DIM, 4)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            memory = self.norm(self.embedding(ids))
            return memory, self.head(self.last(self.embedding(ids) + self.cross(memory)))

    check(Pair(), tokens(2, 5, high=20), actions="folded back, folded")


def test_a_norm_behind_a_norm_and_one_that_is_used_twice():
    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = make("batch", DIM), make("un", DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(torch.tanh(x))) + self.first(torch.tanh(-x)))

    _, report = check(Double(), torch.randn(3, 5, DIM))
    assert report.count("folded") == 1


@pytest.mark.parametrize("name", ["mt pre", "mt post", "mt dynamicconv", "lm"])
def test_our_own_models_fold_whole_and_stay_tied(name):
    torch.manual_seed(0)
    config = Model(width=16, hidden=32, depth=2, heads=2, tie=True, placement="post" if name == "mt post" else "pre")
    config = dataclasses.replace(config, attention="dynamicconv") if name == "mt dynamicconv" else config
    if name == "lm":
        model, example = DecoderLM(config, 20), (tokens(2, 7, high=20),)
    else:
        model, example = Seq2Seq(config, 20, 20), (tokens(2, 7, high=20), tokens(2, 6, high=20))
    model = randomize(convert(model, "un")).eval()
    ties = len({id(p) for p in model.parameters()})
    folded, report = fold(model, *example)
    assert report.foldable == f"{len(report)} of {len(report)}", str(report)
    assert report.max_error < 1e-12
    assert len({id(p) for p in folded.parameters()}) <= ties
    before, saved = dict(model.named_buffers()), folded.state_dict()
    changed = [key for key, t in folded.named_buffers() if not torch.equal(t, before[key])]
    assert changed
    assert saved.keys() >= set(changed), "computed positions that take a scale are saved"


def test_pytorchs_own_encoder_keeps_one_of_its_norms():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "un")
    folded, report = check(model, torch.randn(2, 7, 16), src_key_padding_mask=~padding().bool())
    assert report.foldable == "3 of 4"
    assert sum(isinstance(module, Affine) for module in folded.modules()) == 1
    assert "all but one can be folded" in next(row.why for row in report if row.action == "multiply-add")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_slow_fold_shows_its_steps_on_a_terminal_only(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    with progress.steps("fold") as step:
        step("trace")
        step("verify")
    seen = capsys.readouterr().err
    assert ("fold: trace" in seen) == ("fold: verify" in seen) == terminal


def test_sliced_position_embedding_folds_as_a_table():
    class Positions(nn.Embedding):
        def forward(self, length: int) -> Tensor:
            return self.weight[:length]

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.positions, self.norm = nn.Embedding(20, DIM), Positions(9, DIM), make("batch", DIM)
            self.head = nn.Linear(DIM, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.embedding(ids) + self.positions(ids.shape[1])))

    check(Sliced(), tokens(2, 5, high=20), actions="folded")


class Experts(nn.Module):
    """A pre-norm block whose experts add weighted rows to zeros; embedding and head are tied."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.router = nn.Embedding(20, DIM), make("batch", DIM), nn.Linear(DIM, 2)
        self.experts, self.last = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]), make("batch", DIM)
        self.head = nn.Linear(DIM, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        y = self.norm(x)
        weights, out = self.router(y).softmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(index, len(x), 2)
            out.index_add_(0, rows, expert(y[rows]) * weights[rows, index, None])
        return self.head(self.last(x + out))


def test_experts_add_their_rows_to_a_stream_that_stays_tied():
    folded, _ = check(Experts(), tokens(2, 6, high=20), actions="folded, folded")
    assert folded.head.weight is folded.embedding.weight


def written(y: Tensor, mask: Tensor) -> Tensor:
    """Rows where a mask is not 0, written into zeros."""
    rows = torch.zeros_like(y)
    rows[mask > 0] = y[mask > 0]
    return rows


@pytest.mark.parametrize("masked", [lambda y, mask: y * mask[..., None], written])
def test_a_mask_that_multiplies_or_selects_passes_gains_and_no_shift(masked):
    class Masked(nn.Module):
        def __init__(self, spec: str):
            super().__init__()
            self.norm, self.head = make(spec, DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(masked(self.norm(torch.tanh(x)), mask))

    example = torch.randn(2, 5, DIM), (torch.arange(10).view(2, 5) % 3 > 0).float()
    _, report = check(Masked("batch"), *example, actions="add")
    assert "a mask or a factor between the norm" in report.rows[0].why
    check(Masked("un(bias=False)"), *example, actions="folded")


@pytest.mark.parametrize("norm", [nn.LayerNorm, partial(make, "layer"), partial(make, "dyt")])
def test_a_norm_of_tokens_takes_the_coordinate_of_a_frozen_one_behind_it(norm):
    model = nn.Sequential(norm(DIM), make("batch", DIM), nn.Tanh())
    _, report = check(model, torch.randn(3, 5, DIM), actions="gain changed, folded back")
    assert report.rows[1].into == ("0",)


def test_a_norm_that_returns_its_input_is_not_taken_for_what_wrote_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.write, self.layer = make("batch", DIM), nn.Linear(DIM, DIM)
            self.norm = make("nonorm", DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.write(torch.tanh(x))
            return x + torch.tanh(self.layer(self.norm(x)))

    check(Block(), torch.randn(3, 5, DIM), actions="multiply-add, folded")


def test_multiply_adds_leave_each_norm_as_one_and_no_factor_in_a_weight():
    model, ids = Post(depth=4), tokens(2, 5, high=20)
    folded, report = check(model, ids, actions=", ".join(["multiply-add"] * 4), multiply_adds=True)
    assert report.largest_factor == 1
    assert all(isinstance(norm, Affine) for norm in folded.norms)
