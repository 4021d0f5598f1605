"""Recipes and arguments: files, keys, checks and the parser."""
