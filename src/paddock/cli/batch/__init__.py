"""`paddock batch`: one command in many sandboxes."""
