"""Tests of `runtime/local`."""
