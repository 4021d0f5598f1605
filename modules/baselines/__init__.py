"""Drafters without training, for comparison."""
