"""Tests of `on_cluster/world`."""
