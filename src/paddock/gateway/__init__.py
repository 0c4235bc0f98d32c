"""The gateway: routes and proxies traffic to sandboxes, and wakes paused ones."""
