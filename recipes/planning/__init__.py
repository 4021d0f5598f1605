"""Memory, disk and processes that a recipe needs, counted before it runs."""
