"""The commands, and the generated guides."""
