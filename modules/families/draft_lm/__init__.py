"""Draft language models."""
