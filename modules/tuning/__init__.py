"""Fitting of the draft tree: held-out acceptance, seconds of steps, ways of drafting."""
