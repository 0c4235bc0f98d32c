"""`paddock keyring`: the secrets of the installation on this machine."""
