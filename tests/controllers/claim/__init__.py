"""Tests of `controllers/claim`."""
