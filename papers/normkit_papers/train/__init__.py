"""Training: settings (`config`), tasks, and the run that combines them (`run`)."""
