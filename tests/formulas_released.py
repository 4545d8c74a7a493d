"""The released code of the authors in NumPy; `step` as in formulas.py.

Written from the pseudo-code of our notes on the released code (PN-code, MABN-code, UN-code), not from the library.
State is returned under the names and in the shapes of that code.
"""

import numpy as np
from formulas import ROWS, affine_gradients, layer_scale


class Power:
    """MaskPowerNorm: layer-scale, average and EMA of phi in one step, batch v under dx.

    Gradient means run over all rows.
    """

    def __init__(self, dim, eps=1e-5, groups=1, alpha_fwd=0.9, alpha_bkw=0.9, warmup=10_000):
        self.eps, self.groups, self.a_f, self.a_b, self.warmup = eps, groups, alpha_fwd, alpha_bkw, warmup
        self.t, self.phi, self.e = 0, np.ones(dim), np.zeros(dim)

    def step(self, x, dy, keep, weight, bias):
        self.t += 1
        x, back = layer_scale(x, self.groups, 1e-5)
        v = (x[keep] ** 2).mean(0)
        z = x / np.sqrt((v if self.t <= self.warmup else self.phi) + self.eps)
        if self.t < self.warmup:
            self.phi = self.phi * (self.t - 1) / self.t + v / self.t
        self.phi = self.a_f * self.phi + (1 - self.a_f) * v
        approximate = weight * dy - (1 - self.a_b) * self.e * z
        self.e = self.e + (approximate * z).mean(ROWS)
        dx = back(approximate / np.sqrt(v + self.eps))
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), "iters": [self.t]}
        return {**out, "running_phi": self.phi[None, :, None, None], "ema_gz": self.e[None, :, None, None]}


class MABN:
    """MABN2d, the "formal" one."""

    def __init__(self, dim, eps=1e-5, window=16, alpha=0.98, warmup=100, gate=1000):
        self.eps, self.window, self.m, self.warmup, self.gate = eps, window, alpha, warmup, gate
        self.t, self.var, self.x2, self.gz = 0, np.ones(dim), np.zeros((window, dim)), np.zeros((window, dim))

    def step(self, x, dy, keep, weight, bias):
        self.t += 1
        x2 = (x[keep] ** 2).mean(0)
        self.x2[self.t % self.window] = x2
        own = self.t <= self.window or self.t < self.warmup
        v = x2 if own else self.x2.mean(0)
        ratio = np.sqrt(v + self.eps) / np.sqrt(self.var + self.eps)
        r = np.ones_like(v) if self.t <= max(self.gate, self.warmup) else ratio.clip(1 / 5, 5)
        self.var = self.m * self.var + (1 - self.m) * v
        z = x / np.sqrt(v + self.eps)
        g = weight * dy * r
        s = (g * z).mean(ROWS)
        self.gz[self.t % self.window] = s
        dx = (g - z * (s if own else self.gz.mean(0))) / np.sqrt(v + self.eps)
        out = {"y": weight * r * z + bias, "dx": dx, **affine_gradients(dy, r * z), "iters": [self.t]}
        return {**out, "running_var": self.var[None, :, None, None], "buffer_x2": self.x2, "buffer_gz": self.gz}


class MABNPairs:
    """The classification code: each pair of samples normalized by the last `window` pairs."""

    def __init__(self, dim, eps=1e-5, window=16, alpha=0.98):
        self.eps, self.window, self.m, self.t, self.var = eps, window, alpha, 0, np.ones(dim)
        self.x2, self.gz = np.ones((window, dim)), np.zeros((window, dim))

    def smooth(self, old, new):
        line = np.concatenate([old, new])
        means = [line[i + 1 : i + 1 + self.window].mean(0) for i in range(self.window)]
        return new if self.t == 1 else np.stack(means)

    def step(self, x, dy, keep, weight, bias):
        self.t += 1
        shape, pairs = x.shape, (self.window, -1, x.shape[-1])
        x, dy = x.reshape(pairs), dy.reshape(pairs)
        x2 = (x**2).mean(1)
        v, self.x2 = self.smooth(self.x2, x2), x2
        ratio = np.sqrt(v + self.eps) / np.sqrt(self.var + self.eps)
        r = (np.ones_like(v) if self.t < 100 else ratio.clip(1 / 5, 5))[:, None]
        if self.t == 1:
            self.var = v.mean(0)
        self.var = self.m * self.var + (1 - self.m) * v.mean(0)
        sigma = np.sqrt(v + self.eps)[:, None]
        z = x / sigma
        g = weight * dy * r
        s = (g * z).mean(1)
        removed, self.gz = self.smooth(self.gz, s), s
        dx = (g - z * removed[:, None]) / sigma
        band = np.array([[float(i < j <= i + self.window) for j in range(2 * self.window)] for i in range(self.window)])
        y = (weight * r * z + bias).reshape(shape)
        out = {"y": y, "dx": dx.reshape(shape), **affine_gradients(dy, r * z), "iters": [self.t]}
        state = {"running_var": self.var, "pre_x2": self.x2, "pre_gz": self.gz, "sta_matrix": band / self.window}
        return {**out, **state}


class UN:
    """UN1d: r in the gradient alone, means over all rows.

    Filters from `warmup` on, even before the window is full.
    """

    def __init__(
        self, dim, eps=1e-5, window=4, alpha=0.9, warmup=4000, outlier_filtration=False, gate=1000
    ):  # fmt: skip
        self.forward, self.backward = window if isinstance(window, tuple) else (window, window)
        self.eps, self.a, self.warmup, self.filtration, self.gate = eps, alpha, warmup, outlier_filtration, gate
        self.t, self.var, self.ema, self.skipped = 0, np.ones(dim), np.zeros(dim), 0
        self.x2, self.gz = np.zeros((self.forward, dim)), np.zeros((self.backward, dim))

    def step(self, x, dy, keep, weight, bias):
        self.t += 1
        x2 = (x[keep] ** 2).mean(0)
        skip = self.forward == 1
        spread = np.sqrt(self.x2).var(ddof=1)
        slot = self.t % self.forward
        self.x2[slot] = x2
        gap = self.x2.mean(0) - self.geometric()
        if self.filtration and self.t >= self.warmup and (gap > spread * self.forward).any():
            self.x2[slot] = self.var
            self.skipped += 1
            skip = True
        v = x2 if self.t <= self.forward or self.t < self.warmup or skip else self.geometric()
        ratio = np.sqrt(v + self.eps) / np.sqrt(self.var + self.eps)
        r = np.ones_like(v) if self.t <= max(self.gate, self.warmup) or skip else ratio.clip(1 / 5, 5)
        self.var = self.a * self.var + (1 - self.a) * v
        z = x / np.sqrt(v + self.eps)
        g = weight * dy * r
        s = (g * z).mean(ROWS)
        self.gz[self.t % self.backward] = self.ema if skip else s
        m = s if self.t <= self.backward or self.t < self.warmup or skip else self.gz.mean(0)
        self.ema = self.a * self.ema + (1 - self.a) * m
        dx = (g - z * (s if skip else self.ema)) / np.sqrt(v + self.eps)
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, r * z), "iters": [self.t]}
        state = {"running_var": self.var, "ema_gz": self.ema, "buffer_x2": self.x2, "buffer_gz": self.gz}
        return {**out, **state, "skip_counter": [self.skipped]}

    def geometric(self):
        return np.prod(self.x2, axis=0) ** (1 / self.forward)


class Batch:
    """The PowerNorm repository's "batch": LayerScaling1D, then torch's BatchNorm.

    Padding is filled with the mean of the real rows.
    """

    def __init__(self, dim, eps=1e-5, alpha=0.95):
        self.eps, self.alpha, self.t, self.mean, self.var = eps, alpha, 0, np.zeros(dim), np.ones(dim)

    def step(self, x, dy, keep, weight, bias):
        self.t += 1
        u, back = layer_scale(x, 1, 1e-5)
        filled = np.where(keep[..., None], u, u[keep].mean(0))
        n = keep.size
        mean, var = filled.mean(ROWS), filled.var(ROWS)
        sigma = np.sqrt(var + self.eps)
        z, g = (filled - mean) / sigma, weight * dy
        d_filled = (g - g.mean(ROWS) - z * (g * z).mean(ROWS)) / sigma
        du = np.where(keep[..., None], d_filled + d_filled[~keep].sum(0) / keep.sum(), 0)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * mean
        self.var = self.alpha * self.var + (1 - self.alpha) * var * n / (n - 1)
        out = {"y": weight * z + bias, "dx": back(du), **affine_gradients(dy, z), "num_batches_tracked": self.t}
        return {**out, "running_mean": self.mean, "running_var": self.var}


MODELS = {"power": Power, "mabn": MABN, "mabn_cls": MABNPairs, "un": UN, "batch": Batch}
