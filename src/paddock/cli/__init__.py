"""The command-line interface. `main` is the command `paddock`."""

from paddock.cli.program import main

__all__ = ["main"]
