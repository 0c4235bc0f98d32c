"""Tests of `controllers/pool`."""
