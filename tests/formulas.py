"""The formulas of the papers in NumPy, the reference of the tests.

They are written from the papers and not from the library. A new norm gets a class here and a row of `MODELS` at the
end. Every model has `step(x, dy, keep, weight=, bias=, ...)
-> dict`: one training step of rows `x [batch, positions, C]` with upstream gradient `dy`, `keep [batch, positions]`
True where a row is real. It returns the output `y`, the gradient `dx`, one entry a parameter (its gradient) and one a
buffer (its value after the step). g = weight * dy throughout.

PNP = Shen et al. 2020, arXiv:2003.07845; UNP = Yang et al. 2022, arXiv:2208.01313; TWT = Nguyen & Salazar 2019,
arXiv:1910.05895. Padding (all methods): statistics are means over real rows. Where a gradient is exact, its means sum
over all rows and divide by the number of real ones, for padded outputs depend on the statistics too; where it is an
approximation they sum over real rows. Either way padded rows, of which no statistic is made, get no correction.
"""

import math

import numpy as np

ROWS = (0, 1)
erf = np.vectorize(math.erf)


def affine_gradients(dy, z):
    """dL/dgamma = sum dy z, dL/dbeta = sum dy, over all rows."""
    return {"weight": (dy * z).sum(ROWS), "bias": dy.sum(ROWS)}


# -- per token --------------------------------------------------------------------------------------------------------


class RMS:
    """Zhang & Sennrich 2019: y = gamma x / sqrt(mean x^2 + eps), without bias.

    Their code: x / (sqrt(mean x^2) + eps). With groups each run of C / G channels is divided by its own root.
    """

    def __init__(self, dim, eps=1e-5, eps_at="inside", groups=1):
        self.eps, self.inside, self.groups = eps, eps_at == "inside", groups

    def step(self, x, dy, keep, weight):
        runs = (*x.shape[:-1], self.groups, -1)
        a, g = x.reshape(runs), (weight * dy).reshape(runs)
        square = (a**2).mean(-1, keepdims=True)
        root = np.sqrt(square + self.eps) if self.inside else np.sqrt(square)
        divisor = root if self.inside else root + self.eps
        # d divisor / dx = x / (C root), so dx = g / divisor - x / (root divisor^2) mean(g x)
        dx = (g / divisor - a / (root * divisor**2) * (g * a).mean(-1, keepdims=True)).reshape(x.shape)
        z = (a / divisor).reshape(x.shape)
        return {"y": weight * z, "dx": dx, "weight": (dy * z).sum(ROWS)}


class Group:
    """Wu & He 2018, Eq. 1-7: groups of C / G channels, of one token or of all real positions."""

    def __init__(self, dim, eps=1e-5, groups=8, over="token"):
        self.eps, self.groups, self.over = eps, groups, over

    def step(self, x, dy, keep, weight, bias):
        z, g, dx = np.empty_like(x), weight * dy, np.empty_like(x)
        size = x.shape[-1] // self.groups
        for i in np.ndindex(*(x.shape[:2] if self.over == "token" else x.shape[:1])):
            real = np.ones((1,), bool) if self.over == "token" else keep[i]
            for k in range(0, x.shape[-1], size):
                part = (*i, slice(k, k + size)) if self.over == "token" else (*i, slice(None), slice(k, k + size))
                a, b = np.atleast_2d(x[part]), np.atleast_2d(g[part])
                n = real.sum() * size
                mean = a[real].sum() / n
                sigma = np.sqrt(((a[real] - mean) ** 2).sum() / n + self.eps)
                u = (a - mean) / sigma
                back = (b - real[:, None] * (b.sum() / n + u * (b * u).sum() / n)) / sigma
                z[part], dx[part] = u.reshape(z[part].shape), back.reshape(z[part].shape)
        return {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z)}


class Instance(Group):
    """Ulyanov et al. 2016: each channel over the real positions of its sample."""

    def __init__(self, dim, eps=1e-5):
        super().__init__(dim, eps, dim, "sample")


class Layer(Group):
    """Ba et al. 2016: gamma (x - mean) / sqrt(var + eps) + beta, biased variance of a token: one group."""

    def __init__(self, dim, eps=1e-5):
        super().__init__(dim, eps, 1)


class Scale:
    """TWT Eq. 5: y = g x / max(||x||, eps), one scalar g. The maximum cuts the gradient."""

    def __init__(self, dim, eps=1e-5, learn=True):
        self.eps, self.learn = eps, learn

    def step(self, x, dy, keep, weight):
        length = np.linalg.norm(x, axis=-1, keepdims=True)
        u = x / np.maximum(length, self.eps)
        along = (u * dy).sum(-1, keepdims=True)
        dx = np.where(
            length >= self.eps, weight / np.maximum(length, self.eps) * (dy - u * along), weight / self.eps * dy
        )
        out = {"y": weight * u, "dx": dx}
        return {**out, "weight": np.array([(dy * u).sum()])} if self.learn else out


class NoNorm:
    """UNP Table 1: the identity."""

    def __init__(self, dim):
        pass

    def step(self, x, dy, keep):
        return {"y": x, "dx": dy}


class DyT:
    """Zhu et al. 2025, arXiv:2503.10622, Eq. 1: y = gamma tanh(a x) + beta, a scalar a."""

    def __init__(self, dim, alpha=0.5):
        pass

    def step(self, x, dy, keep, weight, bias, a):
        z = np.tanh(a * x)
        slope = weight * dy * (1 - z**2)
        return {"y": weight * z + bias, "dx": slope * a, "a": np.array([(slope * x).sum()]), **affine_gradients(dy, z)}


class Derf:
    """arXiv:2512.10938: y = gamma erf(a x + s) + beta, scalars a and s."""

    def __init__(self, dim, alpha=0.5):
        pass

    def step(self, x, dy, keep, weight, bias, a, s):
        z = erf(a * x + s)
        slope = weight * dy * 2 / np.sqrt(np.pi) * np.exp(-((a * x + s) ** 2))
        da, ds = np.array([(slope * x).sum()]), np.array([slope.sum()])
        return {"y": weight * z + bias, "dx": slope * a, "a": da, "s": ds, **affine_gradients(dy, z)}


def fixnorm(matrix, tokens, dy_in, h, dy_out, eps=1e-12):
    """TWT section 2.3, Eq. 6 and gradients: E = W / ||w||, x = sqrt(d) E[token], h E^T."""
    length = np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), eps)
    unit = matrix / length
    d_unit = dy_out.T @ h
    np.add.at(d_unit, tokens, np.sqrt(matrix.shape[1]) * dy_in)
    d_matrix = (d_unit - unit * (unit * d_unit).sum(1, keepdims=True)) / length
    return {"x": np.sqrt(matrix.shape[1]) * unit[tokens], "logits": h @ unit.T, "matrix": d_matrix, "h": dy_out @ unit}


# -- per channel ------------------------------------------------------------------------------------------------------


class Channels:
    """Counters of all norms with batch statistics; these tests skip no step."""

    def counters(self):
        self.t += 1
        return {"step": self.t, "skipped": 0, "skipped_grad": 0}

    t = 0


class Batch(Channels):
    """PNP Algorithm 1, Eq. 3; running variance with n / (n - 1) as torch, or without."""

    def __init__(self, dim, eps=1e-5, alpha=0.9, running_var="unbiased"):
        self.eps, self.alpha, self.unbiased = eps, alpha, running_var == "unbiased"
        self.mean, self.var = np.zeros(dim), np.ones(dim)

    def step(self, x, dy, keep, weight, bias):
        n, real = keep.sum(), keep[..., None]
        mean = x[keep].mean(0)
        var = ((x[keep] - mean) ** 2).mean(0)
        sigma = np.sqrt(var + self.eps)
        z, g = (x - mean) / sigma, weight * dy
        dx = (g - real * (g.sum(ROWS) / n + z * (g * z).sum(ROWS) / n)) / sigma
        self.mean = self.alpha * self.mean + (1 - self.alpha) * mean
        self.var = self.alpha * self.var + (1 - self.alpha) * var * (n / (n - 1) if self.unbiased else 1)
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), **self.counters()}
        return {**out, "running": np.stack([self.mean, self.var])}


class RepBN(Batch):
    """Guo et al. 2024 (SLAB), arXiv:2405.11582, section 3.2: BN(x) + eta x; eta is `a` here."""

    def step(self, x, dy, keep, weight, bias, a):
        out = super().step(x, dy, keep, weight, bias)
        return {**out, "y": out["y"] + a * x, "dx": out["dx"] + a * dy, "a": np.array([(dy * x).sum()])}


class Renorm(Channels):
    """Ioffe 2017, arXiv:1702.03275, Algorithm 1, schedule of section 4.1; a std is averaged."""

    def __init__(self, dim, eps=1e-5, alpha=0.99, r_max=3.0, d_max=5.0, warmup=5000, r_until=40_000, d_until=25_000):
        self.eps, self.alpha, self.r_max, self.d_max = eps, alpha, r_max, d_max
        self.warmup, self.r_until, self.d_until = warmup, r_until, d_until
        self.mean, self.sigma = np.zeros(dim), np.sqrt(np.ones(dim) + eps)

    def step(self, x, dy, keep, weight, bias):
        n, real, counters = keep.sum(), keep[..., None], self.counters()
        grown = [
            np.clip((self.t - self.warmup) / (until - self.warmup), 0, 1) for until in (self.r_until, self.d_until)
        ]
        r_max, d_max = 1 + (self.r_max - 1) * grown[0], self.d_max * grown[1]
        mean = x[keep].mean(0)
        sigma = np.sqrt(((x[keep] - mean) ** 2).mean(0) + self.eps)
        r = np.clip(sigma / self.sigma, 1 / r_max, r_max)
        d = np.clip((mean - self.mean) / self.sigma, -d_max, d_max)
        self.mean = self.mean + (1 - self.alpha) * (mean - self.mean)
        self.sigma = self.sigma + (1 - self.alpha) * (sigma - self.sigma)
        centred, g = x - mean, weight * dy
        z = centred / sigma * r + d
        mean_g, mean_gx = (r * g).sum(ROWS) / n, (r * g * centred).sum(ROWS) / n
        dx = (r * g - real * (mean_g + centred / sigma**2 * mean_gx)) / sigma
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), **counters}
        return {**out, "running": np.stack([self.mean, self.sigma**2 - self.eps])}


class PNV(Channels):
    """PNP Definition 1, Eq. 6, and its exact gradient, Lemma 8."""

    def __init__(self, dim, eps=1e-5, alpha=0.9):
        self.eps, self.alpha, self.psi2 = eps, alpha, np.ones(dim)

    def step(self, x, dy, keep, weight, bias):
        n, real = keep.sum(), keep[..., None]
        psi2 = (x[keep] ** 2).sum(0) / n
        psi = np.sqrt(psi2 + self.eps)
        z, g = x / psi, weight * dy
        dx = (g - real * z * (g * z).sum(ROWS) / n) / psi
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * psi2
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), **self.counters()}
        return {**out, "running": self.psi2[None]}


def layer_scale(x, groups, eps):
    """PNP section 4.2: divide groups of channels by their root mean square; and its gradient."""
    split = x.reshape(*x.shape[:-1], groups, -1)
    root = np.sqrt((split**2).mean(-1, keepdims=True) + eps)
    u = split / root

    def back(du):
        du = du.reshape(split.shape)
        return ((du - u * (du * u).mean(-1, keepdims=True)) / root).reshape(x.shape)

    return u.reshape(x.shape), back


class Power(Channels):
    """PNP Definition 3, Algorithm 2, Eq. 8-13.

    `warmup` steps by the batch's own statistic, as the released code.
    """

    def __init__(self, dim, eps=1e-5, groups=1, alpha_fwd=0.9, alpha_bkw=0.9, warmup=4000, clamp=False, form="paper"):
        self.eps, self.groups, self.alpha_fwd, self.alpha_bkw = eps, groups, alpha_fwd, alpha_bkw
        self.warmup, self.clamp = warmup, clamp
        self.psi2, self.nu = np.ones(dim), np.zeros(dim)

    def step(self, x, dy, keep, weight, bias):
        counters, t = self.counters(), self.t
        if self.groups:
            x, back = layer_scale(x, self.groups, self.eps)
        batch2 = (x[keep] ** 2).mean(0)
        warm = t <= self.warmup
        psi = np.sqrt((batch2 if warm else self.psi2) + self.eps)
        z, g = x / psi, weight * dy  # (8)
        y = weight * z + bias  # (9)
        self.psi2 = self.psi2 * (t - 1) / t + batch2 / t if warm else self.ema(self.psi2, batch2)
        gamma, lam = (z[keep] ** 2).mean(0), (g * z)[keep].mean(0)
        dx = (g - keep[..., None] * (lam if warm else self.nu) * z) / psi  # (11, 12)
        factor = 1 - (1 - self.alpha_bkw) * gamma
        factor = np.maximum(factor, 0) if self.clamp else factor
        self.nu = self.nu * factor + (1 - self.alpha_bkw) * lam  # (13)
        out = {"y": y, "dx": back(dx) if self.groups else dx, **affine_gradients(dy, z), **counters}
        return {**out, "running": self.psi2[None], "nu": self.nu[None]}

    def ema(self, old, new):
        return self.alpha_fwd * old + (1 - self.alpha_fwd) * new


class ReleasedPower(Power):
    """The authors' MaskPowerNorm, without padding: average and EMA of phi in one step, batch v under dx."""

    e = 0.0

    def step(self, x, dy, keep, weight, bias):
        counters, t = self.counters(), self.t
        x, back = layer_scale(x, self.groups, self.eps)
        v = (x**2).mean(ROWS)
        z = x / np.sqrt((v if t <= self.warmup else self.psi2) + self.eps)
        if t < self.warmup:
            self.psi2 = self.psi2 * (t - 1) / t + v / t
        self.psi2 = self.ema(self.psi2, v)
        approximate = weight * dy - (1 - self.alpha_bkw) * self.e * z
        self.e = self.e + (approximate * z).mean(ROWS)
        dx = back(approximate / np.sqrt(v + self.eps))
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), **counters}
        return {**out, "running": self.psi2[None], "nu": (1 - self.alpha_bkw) * self.e[None]}


class MABN(Channels):
    """The released MABN2d."""

    def __init__(
        self, dim, eps=1e-5, window=16, alpha=0.98, warmup=100, renorm_after=1000, r_max=5.0
    ):  # fmt: skip
        self.eps, self.window, self.alpha, self.warmup = eps, window, alpha, warmup
        self.renorm_after, self.r_max = renorm_after, r_max
        self.x2, self.gz, self.var = np.zeros((window, dim)), np.zeros((window, dim)), np.ones(dim)

    def step(self, x, dy, keep, weight, bias):
        counters, t = self.counters(), self.t
        batch2 = (x[keep] ** 2).mean(0)
        self.x2[t % self.window] = batch2
        own = t <= self.window or t < self.warmup
        r = 1.0
        v = batch2 if own else self.x2.mean(0)
        if t > max(self.renorm_after, self.warmup):
            r = np.clip(np.sqrt(v + self.eps) / np.sqrt(self.var + self.eps), 1 / self.r_max, self.r_max)
        self.var = self.alpha * self.var + (1 - self.alpha) * v
        sigma = np.sqrt(v + self.eps)
        z = x / sigma
        g = weight * r * dy
        s = (g * z)[keep].mean(0)
        self.gz = np.vstack([self.gz[1:], s])
        psi = s if own else self.gz.mean(0)
        dx = (g - keep[..., None] * z * psi) / sigma
        out = {"y": weight * r * z + bias, "dx": dx, **affine_gradients(dy, r * z), **counters}
        return {**out, "running": self.var[None], "window_x": self.x2.copy(), "window_g": self.gz.copy()}


class UN(Channels):
    """UNP Algorithm 2, Eq. 16-19.

    Recorded quadratic means are at least eps, so that one dead channel is no zero.
    """

    def __init__(
        self, dim, eps=1e-5, window=4, alpha=0.9, warmup=4000, outlier_filtration=False, window_bkw=None,
        alpha_bkw=None, threshold="scalar", form="paper",
    ):  # fmt: skip
        self.alpha_bkw = alpha if alpha_bkw is None else alpha_bkw
        self.eps, self.alpha, self.warmup, self.filtration = eps, alpha, warmup, outlier_filtration
        self.threshold, self.forward, self.backward = threshold, window, window_bkw or window
        self.x2, self.gz = np.zeros((self.forward, dim)), np.zeros((self.backward, dim))
        self.var, self.psi, self.filtered = np.ones(dim), np.zeros(dim), 0

    def step(self, x, dy, keep, weight, bias):
        counters, t = self.counters(), self.t
        batch2 = (x[keep] ** 2).mean(0)
        spread = np.sqrt(self.x2).var(ddof=1) if self.threshold == "scalar" else np.sqrt(self.x2).var(0, ddof=1)
        slot = t % self.forward
        self.x2[slot] = np.maximum(batch2, self.eps)
        own = t <= self.forward or t < self.warmup or self.forward == 1
        outlier = False
        if self.filtration and not own:  # (19)
            outlier = bool((self.x2.mean(0) - self.geometric() > self.forward * spread).any())
            if outlier:
                self.x2[slot] = np.maximum(self.var, self.eps)
                self.filtered += 1
        v = batch2 if own or outlier else self.geometric()  # (16)
        self.var = self.alpha * self.var + (1 - self.alpha) * v

        sigma = np.sqrt(v + self.eps)
        z, g = x / sigma, weight * dy
        s = (g * z)[keep].mean(0)
        self.gz = np.vstack([self.gz[1:], self.psi if outlier else s])
        early = t <= self.backward or t < self.warmup or self.forward == 1
        psi = self.alpha_bkw * self.psi + (1 - self.alpha_bkw) * (s if early or outlier else self.gz.mean(0))  # (17)
        self.psi = psi
        dx = (g - keep[..., None] * z * (s if early or outlier else psi)) / sigma
        out = {"y": weight * z + bias, "dx": dx, **affine_gradients(dy, z), **counters}
        return {**out, **self.state()}

    def state(self):
        state = {"running": self.var[None], "window_x": self.x2.copy(), "window_g": self.gz.copy()}
        return {**state, "psi": self.psi[None], "filtered": self.filtered}

    def geometric(self):
        return np.prod(self.x2, axis=0) ** (1 / self.forward)


class ReleasedUN(UN):
    """The authors' UN1d, without padding: r in the gradient alone, psi in it from the first step."""

    def step(self, x, dy, keep, weight, bias):
        counters, t = self.counters(), self.t
        x2, skip = (x**2).mean(ROWS), self.forward == 1
        spread = np.sqrt(self.x2).var(ddof=1)
        self.x2[t % self.forward] = x2
        gap = self.x2.mean(0) - self.geometric()
        if self.filtration and t >= self.warmup and (gap > spread * self.forward).any():
            self.x2[t % self.forward] = self.var
            self.filtered += 1
            skip = True
        v = x2 if t <= self.forward or t < self.warmup or skip else self.geometric()
        ratio = np.sqrt(v + self.eps) / np.sqrt(self.var + self.eps)
        r = np.ones_like(v) if t <= max(1000, self.warmup) or skip else ratio.clip(1 / 5, 5)
        self.var = self.alpha * self.var + (1 - self.alpha) * v
        z = x / np.sqrt(v + self.eps)
        g = weight * dy * r
        s = (g * z).mean(ROWS)
        self.gz = np.vstack([self.gz[1:], self.psi if skip else s])  # theirs is a ring
        m = s if t <= self.backward or t < self.warmup or skip else self.gz.mean(0)
        self.psi = self.alpha * self.psi + (1 - self.alpha) * m
        dx = (g - z * (s if skip else self.psi)) / np.sqrt(v + self.eps)
        out = {"y": weight * z + bias, "dx": dx, "weight": (dy * r * z).sum(ROWS), "bias": dy.sum(ROWS), **counters}
        return {**out, **self.state()}


MODELS = {
    "layer": Layer, "rms": RMS, "group": Group, "instance": Instance,
    "scale": Scale, "nonorm": NoNorm, "dyt": DyT, "derf": Derf,
    "batch": Batch, "repbn": RepBN, "renorm": Renorm, "pnv": PNV, "power": Power, "mabn": MABN,
    "un": UN,
}  # fmt: skip


RELEASED = {"power": ReleasedPower, "un": ReleasedUN}


def model(name, form="paper"):
    """Return the class with the formulas of a norm, those of its paper or of its authors' code."""
    if form == "released":
        return RELEASED[name]
    if name not in MODELS:
        raise LookupError(f"no formulas for the norm {name!r}: add a class and a row of MODELS to tests/formulas.py")
    return MODELS[name]
