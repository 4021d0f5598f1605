"""The drafter families, a folder each: the drafter with its training, and its layouts as data."""
