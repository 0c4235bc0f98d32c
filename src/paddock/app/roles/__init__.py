"""Roles: what one process of an installation runs."""
