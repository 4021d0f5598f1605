"""Measurement of drafts against the target alone: acceptance, speed, losslessness."""
