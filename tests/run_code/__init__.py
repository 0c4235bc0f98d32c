"""Tests of `run_code`."""
