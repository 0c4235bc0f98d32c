"""A new user's walk: the commands and programs of README and the how-to guides, run in order."""
