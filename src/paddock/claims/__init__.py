"""Claims: the one way to acquire a sandbox, for the API, SandboxClaim and batches."""
