"""Recurrent layers of the target: their states, and their passes over the nodes of a tree."""
