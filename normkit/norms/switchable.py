"""Switchable normalization (Luo et al. 2018, arXiv:1806.10779)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.kernels import reference
from normkit.kernels.records import copy_tensors, is_recomputed
from normkit.kernels.rule import usable
from normkit.norms._base import Norm
from normkit.norms._options import OldShare


class SwitchableNorm(Norm):
    """Standardize by learned mixtures of the statistics of several norms.

    `y = weight * (x - sum_k p_k mu_k) / sqrt(sum_k q_k var_k + eps) + bias`, where p and q are softmaxes of the learned
    `mean_logits` and `var_logits`, 0 at the start (Eq. 3 to 5). The gradient is exact. At inference the running mean
    and variance replace those of the batch; the other statistics depend on the input, so the norm does not fold.

    Each process computes statistics of its own batch. All variances are biased, as those of LayerNorm and BatchNorm;
    the authors' code has unbiased ones of a token, of a channel in one dimension, and of a sample's channel.

    Args:
        over: "token" mixes LayerNorm (k = 0) and BatchNorm (1), as the authors' one-dimensional form, and fits
            decoders. "sample" mixes InstanceNorm (0), LayerNorm over the whole sample (1) and BatchNorm (2), as in the
            paper, over the real positions of `x [batch, ..., dim]`.
        alpha: Share of the old running statistics per step; the authors' code has 0.997, for images 0.9.

    >>> import torch
    >>> SwitchableNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0], [3.0, 5.0]])).tolist()
    [[-1.0, 0.0], [0.0, 1.0]]
    """

    batch_free = False
    whole = "batch"

    over: Literal["token", "sample"] = "token"
    alpha: OldShare = 0.9

    def build(self) -> None:  # noqa: D102
        super().build()
        count = 2 + (self.over == "sample")
        self.mean_logits, self.var_logits = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(count))
        self.running = nn.Buffer(torch.stack([torch.zeros(self.dim), torch.ones(self.dim)]))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        for tensor in (self.mean_logits, self.var_logits, self.running[0]):
            nn.init.zeros_(tensor)
        nn.init.ones_(self.running[1])

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalize `x[..., dim]`; in training, update the running statistics."""
        if self.over == "sample" and x.dim() < 2:
            raise ValueError(f'over="sample" takes x[batch, ..., {self.dim}]; got shape {tuple(x.shape)}')
        if x.numel() == 0:  # with gradients of zeros
            y = reference.affine(x, self.weight, self.bias) + 0 * (self.mean_logits + self.var_logits).sum()
            return y.to(x.dtype)
        shape = (x.shape[0] if x.dim() > 1 else 1, -1)  # `len` would fix the batch in an export
        wide = x.to(torch.promote_types(x.dtype, self.running.dtype)).reshape(*shape, self.dim)
        keep = None if mask is None else mask.reshape(*shape, 1)
        if self.over == "token":
            found = [reference.moments_over(wide, (-1,))]
        else:
            found = [reference.moments_over(wide, axes, keep) for axes in ((1,), (1, 2))]
        if self.training:
            found.append(reference.moments_over(wide, (0, 1), keep))
            batch = torch.cat(found[-1]).detach()[:, 0].to(self.running.dtype)
            ok = usable(batch, torch.ones((), device=x.device) if keep is None else keep.sum())
            if not is_recomputed():
                new = torch.where(ok, self.running.lerp(batch, 1 - self.alpha), self.running)
                if torch.compiler.is_compiling():
                    (new,) = copy_tensors([new])  # which raises where a checkpoint repeats it
                self.running.copy_(new)
        else:
            found.append((self.running[:1, None], self.running[1:, None]))
        logits = self.mean_logits, self.var_logits
        shares = zip(*(each.softmax(0, dtype=wide.dtype) for each in logits), found, strict=True)
        mixed: Any = zip(*((p * mean, q * var) for p, q, (mean, var) in shares), strict=True)
        mean, var = (sum(parts) for parts in mixed)
        y = (wide - mean) / (var + self.eps) ** 0.5
        return reference.affine(y, self.weight, self.bias).to(x.dtype).reshape(x.shape)
