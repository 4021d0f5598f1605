"""The target's own head (MTP)."""
