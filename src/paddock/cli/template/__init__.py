"""`paddock template`: build templates, and list, tag, roll back and delete them."""
