"""Routing: from the address in a request to a sandbox and its route."""
