"""Tests of `app/up`."""
