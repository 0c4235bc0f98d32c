"""The template `code-interpreter-v1`: its files, its steps, and the command that installs it."""
