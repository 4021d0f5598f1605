"""Layers, caches and states that several drafter families share."""
