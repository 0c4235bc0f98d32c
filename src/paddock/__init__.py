"""Paddock keeps sandboxes for AI agents.

`docs/architecture.md` draws the layers; each package's docstring says what belongs in it.
"""

__version__ = "0.1.0"
