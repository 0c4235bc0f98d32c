"""Tests of `runtime/local/launch`."""
