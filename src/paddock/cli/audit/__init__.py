"""`paddock audit`."""
