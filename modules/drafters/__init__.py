"""The trained drafter families, one file each."""
