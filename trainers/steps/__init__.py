"""A training step: optimiser, schedule, clock, guards, checkpoints."""
