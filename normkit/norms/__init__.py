"""The table of norms, and the one string that names a norm everywhere."""

import ast
from typing import Any

from normkit._util import pick, unknown
from normkit.kernels.rule import Stat
from normkit.norms._base import Norm, RowNorm, Split
from normkit.norms._options import option_defaults
from normkit.norms._stat_norm import StatNorm
from normkit.norms.batch import BatchNorm
from normkit.norms.derf import Derf
from normkit.norms.dyt import DyT
from normkit.norms.fix import FixNorm, fix_embedding
from normkit.norms.group import GroupNorm
from normkit.norms.instance import InstanceNorm
from normkit.norms.layer import LayerNorm
from normkit.norms.mabn import MABN
from normkit.norms.nonorm import NoNorm
from normkit.norms.pnv import PNV
from normkit.norms.power import PowerNorm
from normkit.norms.renorm import BatchRenorm
from normkit.norms.repbn import RepBN
from normkit.norms.rms import RMSNorm
from normkit.norms.scale import ScaleNorm
from normkit.norms.un import UN

NORMS: dict[str, type[Norm]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "group": GroupNorm,
    "instance": InstanceNorm,
    "nonorm": NoNorm,
    "dyt": DyT,
    "derf": Derf,
    "batch": BatchNorm,
    "repbn": RepBN,
    "renorm": BatchRenorm,
    "mabn": MABN,
    "pnv": PNV,
    "power": PowerNorm,
    "un": UN,
}

__all__ = [
    "MABN", "NORMS", "PNV", "UN", "BatchNorm", "BatchRenorm", "Derf", "DyT", "FixNorm",
    "GroupNorm", "InstanceNorm", "LayerNorm", "NoNorm", "Norm", "PowerNorm", "RMSNorm", "RepBN", "RowNorm", "ScaleNorm",
    "Split", "Stat", "StatNorm", "fix_embedding", "make", "options", "parse",
]  # fmt: skip


def make(spec: str, dim: int, **factory: Any) -> Norm:
    """Build a norm from its spec: a name, or a name with options.

    The same string names the norm in files, tables and plots.

    Args:
        spec: For example "layer" or "un(window=2)".
        dim: Number of channels.
        **factory: `device` and `dtype`, as in PyTorch's modules.

    Returns:
        The norm, with initial parameters and state.

    Raises:
        ValueError: if a name, an option or a value is unknown; the error proposes the nearest known one.

    >>> make("mabn(window=8)", 16).window
    8
    """
    name, given = parse(spec)
    try:
        return NORMS[name](dim, **given, **factory)
    except ValueError as error:
        raise ValueError(f"{spec!r} with dim={dim!r}: {error}") from None


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into its name and the given options, and check both.

    Raises:
        TypeError: if the spec is no string.
        ValueError: if it cannot be parsed, or its name or an option is unknown.

    >>> parse("un(window=2, warmup=auto)")
    ('un', {'window': 2, 'warmup': 'auto'})
    """
    if not isinstance(spec, str):
        raise TypeError(f"a norm spec is a string such as 'un(window=4)'; got {type(spec).__name__}")
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            given = {str(k.arg): getattr(k.value, "id", None) or ast.literal_eval(k.value) for k in call.keywords}
            name = call.func.id  # a value that is a word needs no quotes
        elif isinstance(call, ast.Name):
            name, given = call.id, {}
        else:
            raise ValueError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"cannot read norm spec {spec!r}; write a name or name(option=value), as 'un(window=4)'"
        ) from None
    if isinstance(call, ast.Call) and len(given) < len(call.keywords):
        raise ValueError(f"norm spec {spec!r} gives an option twice; give each option once")
    known = options(name)
    for key in given:
        pick(known, key, f"option of {name}")
    return name, given


def options(name: str) -> dict[str, object]:
    """Return the options of a norm and their defaults, by the name of the norm.

    >>> options("rms")
    {'eps': 1e-05, 'affine': True, 'bias': False, 'eps_at': 'inside', 'groups': 1}
    """
    if isinstance(name, str) and name not in NORMS:
        raise unknown(NORMS, name, "norm", "; one of your own is added to nk.NORMS, in commands by --import FILE")
    return option_defaults(pick(NORMS, name, "norm"))
