"""The target answers prompts, and the answers become shards of training tokens."""
