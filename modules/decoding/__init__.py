"""The exact decoding loop: propose, verify, commit."""
