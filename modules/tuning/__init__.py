"""Fitting of the draft tree: held-out acceptance, cost model, tree size."""
