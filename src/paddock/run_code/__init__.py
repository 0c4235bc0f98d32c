"""The client of the code interpreter that runs in sandboxes of `code-interpreter-v1`."""
