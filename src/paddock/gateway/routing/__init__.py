"""Routing: from a request's address to a sandbox and its route."""
