"""DNS for sandboxes: a forwarder that enforces egress policies by domain name."""
