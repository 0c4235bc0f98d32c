"""Pausing sandboxes in which nothing happens, where they asked for it."""
