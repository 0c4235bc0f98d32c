"""Tests of `adapters/gateway`."""
