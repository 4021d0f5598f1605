"""Mechanisms that families share."""
