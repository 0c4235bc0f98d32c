"""Tests of `runtime/local/envd`."""
