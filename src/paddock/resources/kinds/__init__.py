"""Kinds as frozen structs, one module each."""
