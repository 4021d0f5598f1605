"""Sampling from the target and the rules that accept or reject drafted tokens."""
