"""The node process: RPC server, records on disk, recovery after a restart, capabilities."""
