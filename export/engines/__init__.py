"""Serving engines that are started to try an export."""
