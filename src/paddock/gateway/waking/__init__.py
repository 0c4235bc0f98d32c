"""Waking paused sandboxes: held requests, one wake per sandbox, in-flight requests."""
