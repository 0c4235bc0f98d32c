"""Tests of `runtime/local/node`."""
