"""Tests of `gateway/routing`."""
