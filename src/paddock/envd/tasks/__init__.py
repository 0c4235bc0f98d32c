"""Tasks: records, retries, logs, the HTTP API, process and container mode."""
