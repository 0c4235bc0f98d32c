"""What people type. `main` is the command `paddock`."""

from paddock.cli.program import main

__all__ = ["main"]
