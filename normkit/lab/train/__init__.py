"""Training: what to train (`config`), how each task is trained and scored, and the run that ties it together."""
