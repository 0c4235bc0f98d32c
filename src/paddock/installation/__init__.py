"""The keyring of an installation: secrets that all its processes share, kept in one file."""
