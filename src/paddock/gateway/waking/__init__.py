"""Waking paused sandboxes: held requests, one wake per sandbox, requests in flight."""
