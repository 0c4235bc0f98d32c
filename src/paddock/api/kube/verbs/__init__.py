"""Verbs of the declarative API: read, write, watch, reviews."""
