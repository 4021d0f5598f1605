"""Text on the terminal, and interruptions from it."""
