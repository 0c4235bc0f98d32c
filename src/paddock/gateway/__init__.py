"""Traffic to sandboxes: addresses, routes, access, waking, proxying, peers."""
