"""Prompt tokens (PPD)."""
