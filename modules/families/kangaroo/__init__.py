"""Kangaroo."""
