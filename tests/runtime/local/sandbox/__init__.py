"""Tests of `runtime/local/sandbox`."""
