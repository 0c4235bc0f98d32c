"""The audit log: one line per call that changes something, and per refused call, for both APIs."""
