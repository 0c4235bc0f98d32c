"""HTTP/1.1 between clients and sandboxes: parsing, rewriting, connections, exchanges."""
