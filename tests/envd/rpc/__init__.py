"""Tests of `envd/rpc`."""
