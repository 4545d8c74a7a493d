"""D'Agostino and Pearson's test of normality, in PyTorch, for many sequences at once."""

import math

import torch
from torch import Tensor


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
