"""Tests of `cli.run`."""
