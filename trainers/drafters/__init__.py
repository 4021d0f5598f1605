"""The training module and the settings of each drafter family."""
