"""What a sandbox sees of itself in /proc and /sys: its own memory, CPUs, load and boot id."""

from paddock.runtime.local.views.views import ResourceViews

__all__ = ["ResourceViews"]
