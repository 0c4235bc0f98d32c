"""Use cases, free of protocol: claim, connect, pause, resume, extend, fork, kill, quota, keys."""
