"""The client of the public APIs."""
