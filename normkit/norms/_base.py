"""The base of all norms.

At inference a norm is `rest(x) * scale + shift`; training is up to the method, in `normalize`. Per-token norms derive
from `RowNorm`, here, norms with running statistics from `StatNorm`: `_stat_norm.py` has their rules, `_state.py` their
buffers. `_options.py` turns annotated class attributes into options. `_inputs.py` turns jagged batches and DTensors
into plain tensors.
"""

from dataclasses import InitVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from normkit._util import format_spec, require
from normkit.kernels import layout
from normkit.kernels.sync import is_group
from normkit.norms._inputs import find_form
from normkit.norms._options import Epsilon, HasOptions, option, option_defaults


class Split(NamedTuple):
    """A norm at inference: `norm(x) == rest(x) * scale + shift`."""

    rest: nn.Module
    scale: Tensor
    shift: Tensor


class Norm(HasOptions, nn.LayerNorm):
    """Base of every norm: normalizes `x[..., dim]`, channels last.

    It derives from PyTorch's LayerNorm in name only, for tools that choose parameters by this class: weight decay of
    Hugging Face's `Trainer`, torchvision's `split_normalization_params`. Tools that would build another layer in its
    place read `normalized_shape`, which it does not have, and fail.

    The output has the shape, the type and the strides of `x`; the arithmetic runs in float32 or wider. Jagged nested
    tensors and DTensors give an output of their kind. Parameters are `weight` and `bias`, None where switched off. A
    subclass declares its options as annotated class attributes and creates further parameters and buffers in `build()`.

    Args:
        dim: Number of channels, the last axis of `x`.
        eps: Added to a variance or mean square before the root; 1e-5 as in most released code.
        affine: Learn a `weight` (and a `bias`) per channel.
        bias: Learn a `bias`; needs `affine`.
        device: Of the parameters and the state, as in PyTorch's modules.
        dtype: Of the parameters; state stays in float32 or wider.

    `mask[...]` is True where a token is real. Per-token norms check it and do not use it.
    `convert(mask_from=...)` passes masks by forward hooks; `norm.mask` is a default for callers that cannot pass one.
    """

    offline: ClassVar[bool] = False  # True: statistics are frozen at inference and `rest` is the identity: it folds
    exact_grad: ClassVar[bool] = True  # True: backward is the derivative of the training forward
    batch_free: ClassVar[bool] = True  # True: an output depends on its own token only, in training too
    whole = "token"  # or "sample": what `normalize` needs in one piece
    contiguous = False  # True: so is the output, whatever x is, as that of the `nn.LayerNorm` in whose place it stands
    _version = 1  # of the state dict: that of nn.Module
    channel_dim = -1  # 1 with the hooks of `channels_first`, which take and return `[batch, channels, ...]`

    dim: int = option(kw_only=False)
    eps: Epsilon = 1e-5
    affine: bool = True
    with_bias: bool = option(default=True, alias="bias")
    if TYPE_CHECKING:  # arguments that are not stored
        device: InitVar[torch.device | str | int | None] = None
        dtype: InitVar[torch.dtype | None] = None

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""
        groups = getattr(self, "groups", 0)
        require(not groups or self.dim % groups == 0, "groups", groups, f"a divisor of dim={self.dim}")
        self.mask: Tensor | None = None
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(self.dim)) if self.affine else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(self.dim)) if self.affine and self.with_bias else None

    def gains(self) -> Tensor | None:
        """Return the factors `[dim]` on a token of mean square 1: `weight` for most norms."""
        return self.weight

    def reset_parameters(self) -> None:
        """Set parameters and state to their initial values."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_warmup(self) -> None:
        """Restart the warm-up before fine-tuning; no effect on norms without statistics."""

    def split(self) -> Split:
        """Return the norm at inference: `rest` without weight and bias, and these, `[dim]`."""
        rest, like = self._without("affine"), self._tensor()
        scale = torch.ones(self.dim, device=like.device) if self.weight is None else self.weight.expand(self.dim)
        return Split(rest, scale, torch.zeros_like(scale) if self.bias is None else self.bias)

    def _without(self, option: str) -> "Norm":
        """Copy the norm for inference, with an option switched off and without hooks."""
        kind: Any = type_before_parametrizations(self)
        copy, like = kind.__new__(kind), self._tensor()  # a derived class may have a constructor with other arguments
        HasOptions.__init__(copy, self.dim, **{name: self.option(name) for name in self.declared} | {option: False})
        vars(copy).update({name: value for name, value in vars(self).items() if not hasattr(copy, name)})
        copy.to(like.device, like.dtype).load_state_dict({name: getattr(self, name) for name in copy.state_dict()})
        return copy.eval()

    def _tensor(self) -> Tensor:
        """Return a tensor with the norm's device and type."""
        return next(iter([*self.parameters(), *self.buffers()]), torch.empty(0))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register state, in float32 or wider whatever the default type is."""
        if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Any, recurse: bool = True) -> "Norm":
        """Keep state in float32 or wider through `.half()`, `.bfloat16()` and `.to(dtype)`."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, before[name].to(buffer.device, torch.float32))
        return self

    @property
    def spec(self) -> str:
        """Name and options that differ from their defaults, as `make` reads them.

        A class derived from a norm of the table has that norm's name and options, any other has its own class name. A
        process group as `sync` is left out, as no string can hold one.

        >>> import normkit
        >>> normkit.UN(8, window=2).spec
        'un(window=2)'
        """
        from normkit.norms import NORMS

        names = {kind: name for name, kind in NORMS.items()}
        kind = next((kind for kind in type(self).__mro__ if kind in names), type(self))
        name, defaults = names.get(kind, kind.__name__), option_defaults(kind)
        changed = {key: self.option(key) for key in defaults if self.option(key) != defaults[key]}
        changed = {key: value for key, value in changed.items() if not is_group(value)}
        return format_spec(name, changed)

    def option(self, name: str) -> object:
        """Return this norm's value of an option."""
        if name == "bias":
            return self.bias is not None if self.affine else option_defaults(type(self))["bias"]
        return getattr(self, self.declared[name].attribute if name in self.declared else name)

    def extra_repr(self) -> str:
        """Return size and spec."""
        return f"{self.dim}, {self.spec}"

    def __prepare_scriptable__(self) -> None:
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}, nor any normkit norm. Use torch.compile, "
            "normkit.export, or, for a model in evaluation mode, torch.export.export"
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check and normalize `x[..., dim]`; in training, norms with statistics update them."""
        if type(x) is not Tensor and (normalize := find_form(x)):
            return normalize(self, x, self.mask if mask is None else mask)
        return self.normalize_plain(x, self.check(x, mask))

    def normalize_plain(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalize a plain tensor that is checked; output and gradient have its strides."""
        x = x.contiguous() if self.contiguous else x
        if x.is_contiguous() and x.dim() < 4:  # images of one pixel are contiguous in several orders
            return self.normalize(x, mask)
        inner = layout.gradient_like(x)
        y = self.normalize(inner, mask)
        return x if y is inner else layout.like(y, x)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the normalized `x`, computed in float32 or wider and cast back to `x.dtype`."""
        raise NotImplementedError

    def check(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask to use, after checking input and mask.

        Raises:
            TypeError: if `x` is no floating-point tensor, or the mask is not boolean.
            ValueError: if the shape or the device does not fit.
        """
        if not isinstance(x, Tensor):
            hint = "; to torch.fx, normkit.norms.Norm is a leaf module" if isinstance(x, torch.fx.Proxy) else ""
            raise TypeError(f"{type(self).__name__} takes a tensor [..., {self.dim}], not {type(x).__name__}{hint}")
        if x.is_nested:
            raise TypeError(
                f"{type(self).__name__} takes nested tensors of layout torch.jagged only; build them with "
                "layout=torch.jagged, or nn.TransformerEncoder(enable_nested_tensor=False)"
            )
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{type(self).__name__}(dim={self.dim}) takes x[..., {self.dim}], channels last; got shape "
                f"{tuple(x.shape)}. Build it with dim={x.shape[-1] if x.dim() else '?'}, or move the channels last"
            )
        if not x.dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__} takes floating-point x, not {x.dtype}; convert it first")
        mask = self.mask if mask is None else mask
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor, True where a token is real; got {kind}. Use mask.bool()")
        if mask.shape != x.shape[:-1]:
            raise ValueError(
                f"mask must have the shape of x without its channels, {tuple(x.shape[:-1])}; got {tuple(mask.shape)}"
            )
        if mask.device != x.device:
            raise ValueError(f"mask is on {mask.device}, x on {x.device}; move one of them")
        return mask


class RowNorm(Norm):
    """Per-token norm, without state; a subclass implements `normalize`."""
