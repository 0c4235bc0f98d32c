"""Tests of `app/wiring`."""
