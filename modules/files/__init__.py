"""Files and folders: written whole or not at all, read within bounds, JSON with fields of known types."""
