"""Losses over chunks of the vocabulary, and metrics."""
