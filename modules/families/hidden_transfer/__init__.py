"""Hidden Transfer."""
