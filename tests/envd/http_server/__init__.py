"""Tests of `envd/http`."""
