"""`paddock sandbox`: sandboxes by hand."""
