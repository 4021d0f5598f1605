"""Attention of a target's pass: over trees with explicit masks, over segments of long rows."""
