"""Tests of `runtime/local/isolation`."""
