"""The corrections of a block's guesses."""
