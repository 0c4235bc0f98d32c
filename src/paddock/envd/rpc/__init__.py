"""Connect RPC: protocol, messages, and the services `process` and `filesystem`."""
