"""Tests of `envd/process`."""
