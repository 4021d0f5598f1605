"""Weights and optimiser states divided among processes."""
