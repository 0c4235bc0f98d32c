"""`paddock image`: images of sandboxes on this machine."""
