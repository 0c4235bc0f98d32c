"""Ports of one layer implemented with another layer."""
