"""Stored states: `plan` decides, `controller` acts."""
