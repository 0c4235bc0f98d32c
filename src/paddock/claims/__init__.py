"""Claims: how sandboxes are acquired, for the API, SandboxClaims and batches alike."""
