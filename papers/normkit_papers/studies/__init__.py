"""Named runs, and grids of runs that compare norms."""
