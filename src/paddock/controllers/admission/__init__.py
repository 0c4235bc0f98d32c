"""Admission of pools: plugins say how large a pool may be, and why not larger."""
