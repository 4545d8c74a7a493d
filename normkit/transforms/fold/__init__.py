"""Fold norms away: trace, solve for coordinates, rewrite the weights, verify in float64."""

from normkit.transforms.fold.fold import fold
from normkit.transforms.fold.report import Outcome, Report

__all__ = ["Outcome", "Report", "fold"]
