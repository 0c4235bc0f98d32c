"""Implementations of the ports of one layer with another layer."""
