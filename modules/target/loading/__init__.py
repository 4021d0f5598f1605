"""Targets by name, folder or GGUF file, and the checks of what was loaded."""
