"""`paddock run`: run code in a new sandbox."""
