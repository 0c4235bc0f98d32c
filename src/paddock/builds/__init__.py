"""Data of template builds outside the store: logs, uploaded files, registry credentials."""
