"""Warm sandboxes: `plan` decides how many and which, `controller` acts."""
