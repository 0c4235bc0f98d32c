"""Tests of `gateway/waking`."""
