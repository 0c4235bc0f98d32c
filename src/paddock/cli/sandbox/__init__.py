"""`paddock sandbox`: manage sandboxes."""
