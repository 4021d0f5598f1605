"""Names of the files and folders of an artifact."""


CONFIG, WEIGHTS, CARD, TUNING = "config.json", "model.safetensors", "README.md", "tuning.json"
MEASUREMENTS = "measurements.json"
"""The file of a head with its figures."""
HEADS = "acceptance_heads"
"""Folder of the acceptance heads."""
HEAD = "acceptance head"
"""The kind of each folder in it."""
AGAIN = "copy or train the artifact again"
"""Remedy for a damaged artifact."""
