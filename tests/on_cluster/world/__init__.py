"""Installations on a real API server, for tests and adopted scenarios."""
