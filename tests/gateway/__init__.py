"""The gateway: parsing, routing, proxying, waking."""
