"""EAGLE-1, HASS and FSPAD."""
