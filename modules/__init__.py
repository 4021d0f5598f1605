"""Frozen targets, drafters and the one decoding loop."""
