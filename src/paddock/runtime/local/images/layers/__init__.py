"""The layers of the image store: the directory, and what running imports need of it."""
