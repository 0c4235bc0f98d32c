"""Attacks from inside a sandbox and by other users of the machine, one module per class."""
