"""Tests of `cluster/node`."""
