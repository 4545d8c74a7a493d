"""Real data to learn from: readers, vocabularies, batches."""
