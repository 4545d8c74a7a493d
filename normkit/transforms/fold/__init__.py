"""Fold norms away: trace the model, solve for coordinates, rewrite the weights, verify in float64."""
