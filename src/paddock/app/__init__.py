"""Composition root: builds objects from settings, and roles from objects."""
