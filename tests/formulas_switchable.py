"""The formulas of Switchable Norm in NumPy, in the form of `formulas.py`."""

import numpy as np

ROWS = (0, 1)


class Switchable:
    """Luo et al. 2018, Eq. 3 to 5, with the exact gradient."""

    def __init__(self, dim, eps=1e-5, over="token", alpha=0.9):
        self.eps, self.alpha = eps, alpha
        self.axes = [(2,), (0, 1)] if over == "token" else [(1,), (1, 2), (0, 1)]
        self.running = np.stack([np.zeros(dim), np.ones(dim)])

    def step(self, x, dy, keep, weight, bias, mean_logits, var_logits):
        parts = []
        for axes in self.axes:  # LayerNorm of a token reads that token alone, so padding too
            real = np.broadcast_to(keep[..., None] if axes != (2,) else np.ones_like(keep)[..., None], x.shape)
            n = real.sum(axes, keepdims=True)
            mean = (x * real).sum(axes, keepdims=True) / n
            parts.append((axes, real / n, mean, ((x - mean) ** 2 * real).sum(axes, keepdims=True) / n))
        p, q = (np.exp(logits) / np.exp(logits).sum() for logits in (mean_logits, var_logits))
        mean = sum(share * part[2] for share, part in zip(p, parts, strict=True))
        sigma = np.sqrt(sum(share * part[3] for share, part in zip(q, parts, strict=True)) + self.eps)
        z, g = (x - mean) / sigma, weight * dy
        by_mean, by_var = -g / sigma, -g * z / sigma**2 / 2
        dx, dp, dq = g / sigma, [], []
        for share_mean, share_var, (axes, rate, mu, var) in zip(p, q, parts, strict=True):
            dx = dx + rate * share_mean * by_mean.sum(axes, keepdims=True)
            dx = dx + rate * share_var * 2 * (x - mu) * by_var.sum(axes, keepdims=True)
            dp.append((by_mean * mu).sum())
            dq.append((by_var * var).sum())
        logits = {"mean_logits": p * (dp - p @ dp), "var_logits": q * (dq - q @ dq)}
        batch = np.stack([parts[-1][2][0, 0], parts[-1][3][0, 0]])
        self.running = self.alpha * self.running + (1 - self.alpha) * batch
        gradients = {"dx": dx, "weight": (dy * z).sum(ROWS), "bias": dy.sum(ROWS), **logits}
        return {"y": weight * z + bias, **gradients, "running": self.running}
