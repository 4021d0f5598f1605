"""Files of tokens and of the target's states, and rows read from them."""
