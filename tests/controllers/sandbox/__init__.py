"""Tests of `controllers/sandbox`."""
