"""Admission of pools: plugins limit the size of pools and give the reason."""
