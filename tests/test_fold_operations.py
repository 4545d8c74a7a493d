"""Folding through operations: products, factors, pictures, multiples, rows in the place of others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Read, Two, both_agree_on, check
from small_models import built
from third_party_models import randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.norms import make

# -- operations that pass coordinates ----------------------------------------------------------------------------------


HOW = {
    "a sum": lambda y, z, x: y.flip(0) + y,
    "a sum of multiples": lambda y, z, x: y * 3.0 - y.flip(0) / 2,
    "a mean": lambda y, z, x: y.mean(1),
    "Python's sum": lambda y, z, x: sum([y, y.flip(0)]),
    "neg": lambda y, z, x: -y,
    "add with a factor": lambda y, z, x: torch.add(z, y, alpha=2),
    "sub with a factor": lambda y, z, x: torch.sub(z, y, alpha=3),
    "lerp": lambda y, z, x: y.lerp(z, 0.3),
    "addcmul": lambda y, z, x: torch.addcmul(y, z, torch.sigmoid(x), value=2),
    "slice_scatter": lambda y, z, x: y.slice_scatter(z[:, :2], 1, 0, 2),
    "select_scatter": lambda y, z, x: y.select_scatter(z[:, 1], 1, 0),
    "masked_scatter": lambda y, z, x: y.masked_scatter((x[..., :1] > 1).expand_as(y), z),
    "masked_scatter, one column": lambda y, z, x: y.masked_scatter(x[..., :1] > 1, z),
}


@pytest.mark.parametrize("name", HOW)
def test_operations_that_pass_coordinates(name):
    """A layer reads the norm's output, another layer's output and the input."""
    model = built(lambda m, x: m.last(HOW[name](m.norm(torch.tanh(x)), m.beside(x), x)),
                  norm=make("batch", DIM), beside=nn.Linear(DIM, DIM), last=nn.Linear(DIM, 4))  # fmt: skip
    x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)  # masks nothing
    both_agree_on(model, (x,), (torch.randn(3, 7, DIM),), "folded")


@pytest.mark.parametrize("mask", [lambda x: x > 1, lambda x: x[0, 0] > 1])
def test_elements_of_any_row_written_over_a_norm_keep_it(mask):
    model = Two(lambda y, a, b, x: a(y.masked_scatter(mask(x), b(x).repeat(1, 1, 2))))
    x, later = torch.zeros(2, 5, DIM), torch.randn(3, 7, DIM)
    both_agree_on(model, (x, x), (later, later), "multiply-add")


# -- products other than a Linear's ------------------------------------------------------------------------------------


PRODUCTS = {
    "einsum": ((DIM, 8), lambda x, w: torch.einsum("btd,do->bto", x, w)),
    "einsum, transposed": ((8, DIM), lambda x, w: torch.einsum("btd,od->bto", x, w)),
    "einsum, the weight on the left": ((8, DIM), lambda x, w: torch.einsum("od,btd->bot", w, x)),
    "einsum into heads": ((DIM, 2, 4), lambda x, w: torch.einsum("btd,dhk->bhtk", x, w)),
    "einsum in heads": ((2, 3, 4), lambda x, w: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (2, 3)), w)),
    "parts of a weight": ((4, DIM, 8), lambda x, w: torch.cat([x.bmm(w[:2]), x.bmm(w[2:])])),
    "a matrix on the left": ((8, DIM), lambda x, w: w @ x[0].mT),
    "matrices on the left": ((2, 8, DIM), lambda x, w: w.bmm(x.mT)),
}


def stream(size: tuple[int, ...], product, spec: str = "un(bias=False)") -> nn.Module:
    """A norm of a stream that something else reads, and a product with a parameter behind it."""

    def forward(m, x):
        x = torch.tanh(x)
        return torch.sigmoid(x), product(m.norm(x), m.weight)

    return built(forward, norm=make(spec, DIM), weight=nn.Parameter(torch.randn(size)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_norms_fold_into_parameters_of_any_product(name):
    check(stream(*PRODUCTS[name]), torch.randn(2, 5, DIM), actions="folded")


def test_a_shift_stays_where_a_product_has_no_bias():
    check(stream(*PRODUCTS["einsum into heads"], "batch"), torch.randn(2, 5, DIM), actions="add")


def test_a_weight_that_is_the_same_for_all_groups_or_a_copy_is_only_read():
    repeated = stream((1, DIM, 4), lambda x, w: x.bmm(w.expand(len(x), -1, -1)))
    check(repeated, torch.randn(2, 5, DIM), actions="multiply-add")
    copied = stream((3, DIM, 4), lambda x, w: torch.einsum("btd,edf->btef", x, w))
    check(copied, torch.randn(2, 5, DIM), actions="multiply-add")


def test_norms_fold_into_experts_in_a_batch_and_out_of_them():
    """As in Llama 4: every expert gets all rows, times its gate, in one batch of products."""

    def forward(m, ids):
        x = m.embedding(ids)
        y = m.norm(x).flatten(0, 1)
        gates = torch.sigmoid(m.router(y)).T.unsqueeze(-1)
        gate, value = torch.bmm(y.expand(len(gates), -1, -1) * gates, m.up).chunk(2, -1)
        return m.head(m.last(x + torch.bmm(value * torch.relu(gate), m.down).sum(0).view_as(x)))

    weights = {"up": nn.Parameter(torch.randn(3, DIM, 8)), "down": nn.Parameter(torch.randn(3, 4, DIM))}
    model = built(forward, embedding=nn.Embedding(20, DIM), norm=make("un", DIM), router=nn.Linear(DIM, 3), **weights,
                  last=make("un", DIM), head=nn.Linear(DIM, 20))  # fmt: skip
    check(model, torch.randint(20, (2, 6)), actions="folded, folded")


class Routed(nn.Module):
    """Two of many experts, slices of stacked weights and biases, add their rows."""

    def __init__(self, experts: int, rank=lambda scores: scores.softmax(-1).topk(2), spec: str = "un"):
        super().__init__()
        self.words, self.norm, self.router = nn.Embedding(30, DIM), make(spec, DIM), nn.Linear(DIM, experts)
        self.up, self.up_bias = nn.Parameter(torch.randn(experts, DIM, 4)), nn.Parameter(torch.randn(experts, 4))
        self.down = nn.Parameter(torch.randn(experts, DIM, 4))
        self.last, self.head, self.rank = make(spec, DIM), nn.Linear(DIM, 30), rank

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).flatten(0, 1)
        y = self.norm(x)
        scores, chosen = self.rank(self.router(y))
        out = torch.zeros_like(y)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            hidden = torch.relu(y[rows] @ self.up[expert] + self.up_bias[expert])
            out.index_add_(0, rows, hidden @ self.down[expert].T * scores[rows, place, None])
        return self.head(self.last(x + out))


@pytest.mark.parametrize("spec", ["un", "rms"])
def test_norms_fold_into_many_experts_most_of_which_the_example_does_not_reach(spec):
    few, many = torch.randint(30, (1, 3)), torch.randint(30, (8, 64))
    action = "folded" if spec == "un" else "gain folded"
    _, report = both_agree_on(Routed(24, spec=spec), (few,), (many,), f"{action}, {action}")
    assert any("experts in turn" in label for label in report.tried)


def test_an_expert_that_no_router_can_be_made_to_choose_keeps_the_norm():
    model = Routed(12, lambda scores: (scores[:, :2], torch.full_like(scores[:, :2], 3, dtype=torch.long)))
    _, report = check(model, torch.randint(30, (2, 9)), actions="multiply-add, multiply-add")
    assert "up" in report.rows[0].why


def test_slices_of_one_weight_that_differ_fold_each_its_own_norm():
    def forward(m, x):
        for norm, weight in zip(m.norms, m.weight, strict=True):
            x = x + torch.tanh(norm(x) @ weight)
        return x

    norms = nn.ModuleList(make("rms", DIM) for _ in range(12))
    model = built(forward, norms=norms, weight=nn.Parameter(torch.randn(12, DIM, DIM)))
    _, report = check(model, torch.randn(2, 5, DIM))
    assert report.count("gain folded") == 12


def block(spec: str) -> nn.Module:
    """A block of a diffusion Transformer (Peebles and Xie 2023), with adaLN-Zero."""

    def forward(m, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = m.modulation(condition)[:, None].chunk(6, -1)
        q, k, v = m.qkv(m.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        x = x + gate1 * m.out(F.scaled_dot_product_attention(q, k, v))
        return x + gate2 * m.down(F.gelu(m.up(m.norm2(x) * (1 + scale2) + shift2)))

    layers = {"qkv": nn.Linear(DIM, 3 * DIM), "out": nn.Linear(DIM, DIM), "up": nn.Linear(DIM, 8),
              "down": nn.Linear(8, DIM), "modulation": nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))}  # fmt: skip
    return built(forward, norm1=make(spec, DIM), norm2=make(spec, DIM), **layers)


def test_a_product_with_complex_numbers_is_only_read():
    def spectrum(self, y):
        return torch.view_as_real(self.reader(torch.complex(y, y.square())).transpose(0, 1))

    model = Read(nn.Linear(DIM, 4, dtype=torch.complex128), spectrum).double()
    _, report = fold(model.eval(), torch.randn(2, 5, DIM).double())
    assert [row.action for row in report] == ["multiply-add"]


def test_large_weights_are_followed_as_small_ones_are():
    convolutions = nn.Sequential(nn.Conv2d(3, 192, 1), nn.BatchNorm2d(192), nn.Conv2d(192, 96, 3), nn.BatchNorm2d(96),
                                 nn.ReLU())  # fmt: skip
    check(convolutions, torch.randn(2, 3, 5, 5), actions="folded, folded back")
    left = built(lambda m, x: m.weight @ x.mT, weight=nn.Parameter(torch.randn(300, 256)))
    check(nn.Sequential(make("un(bias=False)", 256), left), torch.randn(7, 256), actions="folded")


# -- norms times a computed tensor -------------------------------------------------------------------------------------


def test_a_modulated_norm_folds_into_what_reads_it_and_the_layer_of_its_shift():
    model = block("un(affine=False)")
    folded, report = check(model, torch.randn(3, 5, DIM), torch.randn(3, DIM), actions="folded, folded")
    assert [row.into for row in report] == [("qkv",), ("up",)]
    before, after = (each.modulation[1].weight.view(6, DIM, DIM) for each in (model, folded))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True] * 2


def test_the_bias_of_a_modulated_norm_stays():
    _, report = check(block("un"), torch.randn(3, 5, DIM), torch.randn(3, DIM), actions="add, add")
    assert "factor" in report.rows[0].why


@pytest.mark.parametrize("condition", [nn.Identity(), make("un", DIM)])
def test_of_two_followed_factors_the_norm_passes_its_gain(condition):
    """A norm times a linear map of a condition, plus another."""

    def forward(m, x, condition):
        condition = m.condition(condition)
        return m.head(m.scale(condition) * m.norm(torch.tanh(x)) + m.shift(condition))

    layers = {"head": nn.Linear(DIM, 4), "scale": nn.Linear(DIM, DIM), "shift": nn.Linear(DIM, DIM)}
    model = built(forward, norm=make("un(bias=False)", DIM), condition=condition, **layers)
    actions = "folded" if isinstance(condition, nn.Identity) else "folded, folded"
    check(model, torch.randn(3, 5, DIM), torch.randn(3, 5, DIM), actions=actions)


@pytest.mark.parametrize("gated", [
    lambda self, y: self.reader(y * torch.sigmoid(self.gate(y))),
    lambda self, y: self.reader(y / (1 + self.gate(y).square())),
    lambda self, y: self.reader(F.silu(self.gate(y)) * y.flip(-1)),
])  # fmt: skip
def test_a_norm_that_also_computes_its_gate_folds(gated):
    model = Read(nn.Linear(DIM, 4), gated, "un(bias=False)")
    model.gate = nn.Linear(DIM, DIM)
    check(model, torch.randn(3, 5, DIM), actions="folded")


@pytest.mark.parametrize("read", [
    lambda self, y: self.reader(y * y.roll(1, -1)),
    lambda self, y: self.reader(torch.sigmoid(y) / y.square().add(1) + y.square()),
    lambda self, y: self.reader(self.reader.weight.sum() / (y * y + 1)),
])  # fmt: skip
def test_a_norm_times_itself_stays(read):
    check(Read(nn.Linear(DIM, 4), read, "un(bias=False)"), torch.randn(3, 5, DIM), actions="multiply-add")


# -- pictures and volumes ----------------------------------------------------------------------------------------------


TRANSPOSED = {
    "1-d, one position each": (nn.BatchNorm1d, nn.ConvTranspose1d(DIM, DIM, 2, stride=2)),
    "2-d, overlapping": (nn.BatchNorm2d, nn.ConvTranspose2d(DIM, DIM, 3, stride=2, padding=1, output_padding=1)),
    "2-d, groups, no bias": (nn.BatchNorm2d, nn.ConvTranspose2d(DIM, DIM, 3, groups=2, dilation=2, bias=False)),
    "3-d": (nn.BatchNorm3d, nn.ConvTranspose3d(DIM, DIM, 2, stride=2, groups=DIM)),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_convolutions_take_scales_and_write_shifts(kind):
    norm, layer = TRANSPOSED[kind]

    def model(*parts: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Tanh(), *parts, nn.Tanh())

    x = torch.randn(2, DIM, *[4] * (layer.weight.dim() - 2))
    check(model(layer, norm(DIM)), x, actions="folded back")
    check(model(norm(DIM), layer), x, actions="add")  # an output may read no input
    check(model(layer, norm(DIM), copy.deepcopy(layer)), x, actions="folded")  # the shift goes back


def residual(post: bool) -> nn.Module:
    """Convolutions and norms beside a residual; the last norm is added to the stream or stands behind it."""

    def forward(m, x):
        relu, (a, b, c), (f, g, h) = torch.relu, m.convs, m.norms
        x = relu(f(a(x)))
        return m.head(relu(x + h(c(relu(g(b(x)))))) if post else h(x + c(relu(g(b(x))))))

    convs = nn.ModuleList(nn.Conv2d(n, DIM, 1, bias=n == 3) for n in (3, DIM, DIM))
    norms = nn.ModuleList(nn.BatchNorm2d(DIM) for _ in range(3))
    return randomize(built(forward, convs=convs, norms=norms, head=nn.Conv2d(DIM, 2, 1))).eval()


@pytest.mark.parametrize(
    ("post", "key", "value"),
    [(False, "weight", 0.0), (True, "weight", 1e-15), (False, "weight", 1e-42), (True, "weight", -1e-13),
     (False, "bias", 1e6), (True, "bias", 1e-10)],
)  # fmt: skip
def test_one_channel_of_another_size_keeps_no_norm(post, key, value):
    model = residual(post)
    with torch.no_grad():
        for norm in model.norms[1:]:
            getattr(norm, key)[2] = value
    folded, report = fold(model, x := torch.randn(2, 3, 5, 5))
    assert report.count("folded", "folded back") == 3, str(report)
    assert report.max_error < 1e-12
    assert report.native_error < 1e-5
    ordinary = sum(p.numel() for p in fold(residual(post), x)[0].parameters())
    assert sum(p.numel() for p in folded.parameters()) == ordinary, "rounding errors make no bias"


RESIZED = {  # dimensions, operation
    "bilinear and bicubic": (2, lambda y: nn.functional.interpolate(
        nn.functional.interpolate(y, scale_factor=0.5, mode="bilinear"), size=y.shape[-2:], mode="bicubic") + y),
    "trilinear": (3, lambda y: nn.functional.interpolate(y, scale_factor=2, mode="trilinear")),
    "nearest": (3, lambda y: nn.functional.interpolate(y, scale_factor=2)),
    "nearest-exact": (3, lambda y: nn.functional.interpolate(y, scale_factor=2, mode="nearest-exact")),
    "adaptive": (3, lambda y: nn.functional.adaptive_avg_pool3d(y, 2)),
    "reflect": (3, lambda y: nn.functional.pad(y, (1, 1, 0, 1, 1, 0), mode="reflect")),
    "replicate": (3, lambda y: nn.functional.pad(y, (1, 1, 0, 1, 1, 0), mode="replicate")),
    "shuffle": (3, lambda y: nn.functional.channel_shuffle(y, 2)),
}  # fmt: skip


@pytest.mark.parametrize("how", RESIZED)
def test_pictures_and_volumes_are_resized_and_padded(how):
    dims, operation = RESIZED[how]
    norm, head = getattr(nn, f"BatchNorm{dims}d")(DIM), getattr(nn, f"Conv{dims}d")(DIM, 4, 1)
    model = built(lambda m, x: m.head(operation(m.norm(torch.tanh(x)))), norm=norm, head=head)
    check(model, torch.randn(2, DIM, *[4] * dims), actions="folded")
