"""Corrections of a block's guesses by the tokens before them in the block."""
