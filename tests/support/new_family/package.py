"""Bigram."""
