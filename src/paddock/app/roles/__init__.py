"""The roles: each is the program of one process of an installation."""
