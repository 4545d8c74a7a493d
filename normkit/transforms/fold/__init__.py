"""Fold norms away: trace, solve for coordinates, rewrite the weights, verify in float64."""

from normkit.transforms.fold.fold import audit, fold
from normkit.transforms.fold.report import Audit, Outcome, Report

__all__ = ["Audit", "Outcome", "Report", "audit", "fold"]
