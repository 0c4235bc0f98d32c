"""Escape attempts and floods from inside sandboxes of the local driver."""
