"""Instance normalization over time (Ulyanov et al. 2016, arXiv:1607.08022)."""

from typing import ClassVar

from normkit.norms.group import GroupNorm


class InstanceNorm(GroupNorm):
    """Center and scale each channel over the real positions of its sample.

    `GroupNorm(groups=dim, over="sample")`: `x` is `[batch, ..., dim]`, and the mask leaves padding out. An output
    depends on all positions of its sample, later ones too, so a decoder that writes word by word cannot use it. The
    weight and bias per channel are those of `torch.nn.InstanceNorm1d(affine=True)`.

    >>> import torch
    >>> InstanceNorm(1, eps=0.0)(torch.tensor([[[1.0], [3.0]]])).tolist()
    [[[-1.0], [1.0]]]
    """

    groups: ClassVar[int] = 0  # takes the option away; `build` sets it to dim
    over: ClassVar[str] = "sample"  # type: ignore[assignment]

    def build(self) -> None:  # noqa: D102
        self.groups = self.dim  # type: ignore[misc]
        super().build()
