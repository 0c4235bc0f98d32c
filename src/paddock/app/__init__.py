"""Composition root: settings become objects, objects become roles."""
