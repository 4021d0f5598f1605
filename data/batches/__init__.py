"""Training batches: which tokens are learned, their weights, and the data module."""
