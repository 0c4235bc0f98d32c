"""A client of Paddock's public APIs: sandboxes, their commands, files and code."""
