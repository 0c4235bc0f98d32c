"""The node's side of envd: the zygote, the listener that starts envds, and their client."""
