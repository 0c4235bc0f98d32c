"""Tests of `claims`."""
