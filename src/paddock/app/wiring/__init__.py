"""Wiring: settings become objects, shared by the roles."""
