"""Launching a sandbox's first process: the native launcher, init, and their protocol."""
