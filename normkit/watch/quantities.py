"""The table of quantities, each a function of statistics gathered at a norm.

The statistics of all norms of one width are stacked: `[S, C]`, or `[S]` for one number a norm; a quantity is `[S]`.
Only real tokens count. A sample of the input has `mean`, `var`, `quadratic` (mean of squares), their `running_...` from
before this batch, `psi = sqrt(quadratic + eps)`, `sigma`, the affine `weight`, `spread` of its ratio to psi, `count`
of tokens and `largest`. A sample of the gradient has `g_mu`, `g_sigma2`, `g_psi2` and squares of gradients. States of
a norm have the names that its class gives them.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from normkit._util import pick, require

QUARTILES = {  # of |gamma| / psi_B over the channels of a norm: `spread [5, S]`
    "min": (0.0, "least"), "q25": (0.25, "first quartile"), "median": (0.5, "median"), "q75": (0.75, "third quartile"),
    "max": (1.0, "largest"),
}  # fmt: skip

NO_GAIN = 1e-4  # of a norm, which then passes nothing on
DEAD = 1e-6  # a channel is dead whose mean square is at most this fraction of the median channel's


class Quantity(NamedTuple):
    """A quantity: definition, source, the statistics it needs, and the function of these.

    Without a function it is the statistic itself. Expensive ones are recorded only if they are named.
    """

    definition: str
    source: str
    of: str
    function: Callable[..., Tensor] = lambda statistic: statistic
    expensive: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return tuple(self.of.split())


def _per_channel(x: Tensor) -> Tensor:
    """`(1/d) ||x||`, the papers' average Euclidean distance."""
    return torch.linalg.vector_norm(x, dim=-1) / x.shape[-1]


def _distance(batch: Tensor, running: Tensor) -> Tensor:
    return _per_channel(batch - running)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _gap_batch(mean: Tensor, sigma: Tensor, running_mean: Tensor, running_sigma: Tensor) -> Tensor:
    scale, shift = sigma / running_sigma - 1, (mean - running_mean) / running_sigma
    return (scale.square() + shift.square()).mean(-1).sqrt()


def _dead(quadratic: Tensor) -> Tensor:
    return (quadratic <= DEAD * quadratic.median(-1, keepdim=True).values).to(quadratic.dtype).mean(-1)


def _bad(mean: Tensor, quadratic: Tensor) -> Tensor:
    return (~(torch.isfinite(mean) & torch.isfinite(quadratic))).sum(-1).to(mean.dtype)


def _percent_normal(window: Tensor) -> Tensor:
    return (p_normal(window.movedim(-2, 0)) > 0.05).to(window.dtype).mean(-1) * 100


QUANTITIES: dict[str, Quantity] = {
    # batch statistics against running ones
    "distance_mean": Quantity("(1/d) ||mu_B - mu||", "PowerNorm Fig. 2", "mean running_mean", _distance),
    "distance_var": Quantity("(1/d) ||sigma_B^2 - sigma^2||", "PowerNorm Fig. 2, 4", "var running_var", _distance),
    "distance_quadratic": Quantity(
        "(1/d) ||psi_B^2 - psi^2||", "PowerNorm Fig. 4",
        "quadratic running_quadratic", _distance),
    "gap_batch": Quantity(
        "rms over this batch of z_running - z_batch, z as BatchNorm has it: how wrong its output is at evaluation,"
        " 1 being the size of the output itself", "normkit, from Eq. 1 of PowerNorm",
        "mean sigma running_mean running_sigma", _gap_batch),
    "gap_quadratic": Quantity(
        "rms over channels of psi_B / psi - 1: the same for a norm by quadratic means",
        "normkit, from Eq. 4 of PowerNorm",
        "psi running_psi", lambda psi, before: _rms(psi / before - 1)),
    "length": Quantity("real tokens per sequence of the batch", "normkit", "length"),
    "length_spread": Quantity("their standard deviation over the sequences", "normkit", "length_spread"),
    "length_share": Quantity(
        "share of the variance between batches of mu_B / sigma_B and log sigma_B that batch length explains, linearly:"
        " last 50 samples, changes from one to the next, less what is chance", "normkit",
        "share_batch"),
    "length_share_quadratic": Quantity("the same of log psi_B", "normkit", "share_quadratic"),
    # what passes through
    "rms": Quantity("root mean square of the norm's input", "normkit", "quadratic", lambda x: x.mean(-1).sqrt()),
    "largest": Quantity("largest magnitude in the norm's input", "normkit", "largest"),
    "overflow": Quantity("infinite values in the norm's input, where float16 computes", "normkit", "infinite"),
    "zero_channels": Quantity("channels that have been zero in all samples so far", "normkit", "zero"),
    "similarity": Quantity(
        "mean cosine between two tokens of one sequence, in the norm's input", "normkit", "similarity"),
    "dead": Quantity(
        f"share of channels whose psi_B^2 is at most {DEAD:g} of the median one's", "normkit", "quadratic", _dead),
    "nonfinite": Quantity("channels whose statistics are not finite", "normkit", "mean quadratic", _bad),
    "tokens": Quantity("rows that the statistics are taken over", "B of PowerNorm Alg. 1", "count"),
    "padding": Quantity("share of those that are padding", "normkit", "padding"),
    "mask_length": Quantity("length of a given mask that does not fit the norm's input", "normkit", "mask_length"),
    "token_share": Quantity(
        "share of tokens that mean squares effectively average over: mean(e)^2 / mean(e^2), e a token's mean square",
        "normkit", "token_share"),
    "typical_token": Quantity("median over mean of the tokens' mean squares", "normkit", "typical_token"),
    "largest_token": Quantity(
        "root mean square of the largest token over that of the median token", "normkit", "largest_token"),
    "largest_token_place": Quantity("its position in its sequence, from 0", "normkit", "largest_token_place"),
    # the learned scale
    **{
        f"gamma_over_psi_{name}": Quantity(
            f"{text} over channels of |gamma| / psi_B; Lemma 2 holds where it is at most 1",
            "PowerNorm Fig. 7, Lemma 2", "spread", operator.itemgetter(place))
        for place, (name, (_, text)) in enumerate(QUARTILES.items())
    },
    "learned_g": Quantity("mean of the learned weight (ScaleNorm: its g)", "Tears Fig. 3, 4", "weight", _mean),
    "zero_gain": Quantity(
        f"share of channels whose learned weight is at most {NO_GAIN:g} in magnitude", "normkit",
        "weight", lambda gain: (gain.abs() <= NO_GAIN).to(gain.dtype).mean(-1)),
    # gradients
    "g_mu": Quantity("(1/d) ||g_mu||, g_mu = mean(gamma dL/dy)", "PowerNorm Eq. 3, Fig. 3", "g_mu", _per_channel),
    "g_sigma2": Quantity(
        "(1/d) ||g_sigma2||, g_sigma2 = mean(gamma dL/dy z), z = (x - mu_B) / sigma_B", "PowerNorm Eq. 3, Fig. 3, 4",
        "g_sigma2", _per_channel),
    "g_psi2": Quantity(
        "(1/d) ||g_psi2||, g_psi2 = mean(gamma dL/dy z), z = x / psi_B", "PowerNorm Fig. 4; UN Eq. 12",
        "g_psi2", _per_channel),
    "no_gradient": Quantity(
        "share of the output's channels that no gradient has reached in any sample so far", "normkit", "no_gradient"),
    "lipschitz": Quantity(
        "||dL/dx|| of PN-V over ||dL/dy||: sqrt(sum gamma^2/psi^2 (||dy||^2 - <dy, z / sqrt(B)>^2) / sum ||dy||^2)",
        "PowerNorm Lemma 2 (Eq. 7), dL/dy standing for the unnormalized net's as in Assumption 9",
        "dx_square dy_square", lambda dx, dy: (dx.sum(-1) / dy.sum(-1).clamp(min=1e-38)).sqrt()),
    # one channel of each norm
    "channel_activation": Quantity(
        "sigma_t^2 = mean(x^2) of one channel", "UN Fig. 4", "channel_x", lambda x: x[..., -1]),
    "channel_activation_am": Quantity("arithmetic mean of its last values", "UN Fig. 4", "channel_x", _mean),
    "channel_activation_gm": Quantity(
        "geometric mean of its last values", "UN Fig. 4, Eq. 16",
        "channel_x", lambda x: x.clamp(min=1e-38).log().mean(-1).exp()),
    "channel_gradient": Quantity("g_psi2 of the same channel", "UN Fig. 4", "channel_g", lambda x: x[..., -1]),
    "channel_gradient_am": Quantity("arithmetic mean of its last values", "UN Fig. 4, Eq. 17", "channel_g", _mean),
    # states of norms
    "nu": Quantity("(1/d) ||nu||", "PowerNorm Eq. 13", "nu", _per_channel),
    "Gamma": Quantity(
        "largest over channels of mean(z^2), z as PowerNorm's forward has it", "PowerNorm Eq. 13",
        "Gamma", lambda x: x.amax(-1)),
    "Gamma_bound": Quantity(
        "2 / (1 - alpha_bkw): nu contracts where Gamma stays below", "normkit, from Eq. 13; the theorem's own, Eq. 27,"
        " is half of it", "Gamma_bound"),
    "filtered": Quantity("steps that outlier filtration has dropped", "UN Fig. 5", "filtered"),
    "filtered_rate": Quantity(
        "the same as a share of the steps since smoothing began", "UN Fig. 5, Eq. 19",
        "filtered smoothed", lambda n, steps: n / steps.clamp(min=1)),
    "warmup_left": Quantity("steps for which the norm still uses the batch's own statistics", "normkit", "warmup_left"),
    "skipped": Quantity("forwards that moved no statistics, being not finite or all padding", "normkit", "skipped"),
    "skipped_grad": Quantity("backwards that moved none", "normkit", "skipped_grad"),
    # the whole model
    "loss": Quantity("mean training loss of the steps since the last sample", "normkit", "loss"),
    "constant_loss": Quantity(
        "loss of the best constant prediction: entropy or variance, at each place of a target, of those so far",
        "normkit", "constant_loss"),
    "gradient_norm": Quantity(
        "norm of all gradients together, before any clipping", "Tears Fig. 2",
        "gradient", lambda norms: torch.linalg.vector_norm(norms, dim=-1)),
    # expensive
    "pnac_activation": Quantity(
        "percent of channels whose last mean(x^2) pass D'Agostino and Pearson's test of normality, p > 0.05",
        "UN Eq. 15, Fig. 3, 7", "window_x", _percent_normal, expensive=True),
    "pnac_gradient": Quantity(
        "the same of g_psi2", "UN Eq. 15, Fig. 3, 7", "window_g", _percent_normal, expensive=True),
}  # fmt: skip


def choose(names: str | Iterable[str] | None) -> dict[str, Quantity]:
    """The quantities to record: those named.

    "default", or None, are all but the expensive ones, "all" every one.

    >>> list(choose(["rms", "dead"]))
    ['rms', 'dead']
    """
    cheap = [name for name, quantity in QUANTITIES.items() if not quantity.expensive]
    groups = {"default": cheap, "all": list(QUANTITIES)}
    names = "default" if names is None else names
    given = [names] if isinstance(names, str) else names if isinstance(names, Iterable) else []
    chosen = [each for name in given for each in groups.get(name, [name])]
    require(bool(chosen), "quantities", names, "names of quantities, default or all")
    return {name: pick(QUANTITIES, name, "quantity") for name in dict.fromkeys(chosen)}


def p_normal(x: Tensor) -> Tensor:
    """The p-value of the hypothesis that a column of `x [n, ...]` is normally distributed.

    The omnibus test of skewness and kurtosis (D'Agostino & Pearson 1973; D'Agostino, Belanger & D'Agostino 1990):
    `K^2 = Z(b1)^2 + Z(b2)^2`, chi-squared with two degrees of freedom, so `p = exp(-K^2 / 2)`. Equal to
    `scipy.stats.normaltest`, without SciPy and without leaving the device. n is at least 8, better 20. The p-value of
    a column that does not vary is nan.

    >>> x = torch.arange(-10.0, 11)
    >>> bool(p_normal(x) > 0.05), bool(p_normal(x.exp()) > 0.05)
    (True, False)
    """
    n = x.shape[0]
    if n < 8:
        raise ValueError(f"the test of normality takes at least 8 values; got {n}")
    x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
    x = x - x.mean(0)
    m2, m3, m4 = (x.pow(k).mean(0) for k in (2, 3, 4))
    skew, kurtosis = m3 / m2**1.5, m4 / m2**2

    y = skew * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    beta = 3 * (n**2 + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    w2 = -1 + math.sqrt(2 * (beta - 1))
    z_skew = torch.asinh(y / math.sqrt(2 / (w2 - 1))) / math.sqrt(0.5 * math.log(w2))

    expected = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    k = (kurtosis - expected) / math.sqrt(variance)
    b = 6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / b * (2 / b + math.sqrt(1 + 4 / b**2))
    ratio = (1 - 2 / a) / (1 + k * math.sqrt(2 / (a - 4)))
    z_kurtosis = (1 - 2 / (9 * a) - ratio.sign() * ratio.abs().pow(1 / 3)) / math.sqrt(2 / (9 * a))
    return torch.exp(-(z_skew.square() + z_kurtosis.square()) / 2)
