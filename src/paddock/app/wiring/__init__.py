"""Builds the objects of the roles from settings."""
