"""Tests of `gateway/http`."""
