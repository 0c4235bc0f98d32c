"""Processes of a sandbox: registry, spawners, the protocol of init, process trees."""
