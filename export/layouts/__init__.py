"""The checkpoint layouts of serving engines and of official code: written and read."""
