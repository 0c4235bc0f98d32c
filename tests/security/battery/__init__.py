"""Attacks from inside sandboxes as tables, and what runs them."""
