"""Prompts: where they come from, and the chat template that renders them."""
