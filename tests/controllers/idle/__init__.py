"""Tests of `controllers/idle`."""
