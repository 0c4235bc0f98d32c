"""Images of sandboxes: pulled before the start, pinned by the first one."""
