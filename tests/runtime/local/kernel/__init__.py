"""Tests of `runtime/local/kernel`."""
