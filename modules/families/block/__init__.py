"""Drafters of blocks: DFlash, DSpark, Domino and others."""
