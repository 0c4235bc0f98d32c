"""Kernels and contexts: they run code and return events, whatever protocol asks for it."""
