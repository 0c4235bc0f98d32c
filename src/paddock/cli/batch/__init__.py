"""`paddock batch`: run a command in many sandboxes."""
