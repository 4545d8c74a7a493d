"""Fold norms away: trace, solve for coordinates, rewrite the weights, verify in float64."""

from normkit.fold.fold import audit, fold
from normkit.fold.layernorm_to_rmsnorm import to_rms
from normkit.fold.report import Audit, Outcome, Report

__all__ = ["Audit", "Outcome", "Report", "audit", "fold", "to_rms"]
