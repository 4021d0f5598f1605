"""Policies that turn a drafter's scores into a token tree."""
