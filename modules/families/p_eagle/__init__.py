"""P-EAGLE: EAGLE-3 that guesses several tokens in one pass."""
