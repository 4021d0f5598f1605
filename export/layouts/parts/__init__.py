"""Files, tensors and settings that several layouts share."""
