"""Allocation: which pool serves a batch and how many of its sandboxes each batch gets."""
