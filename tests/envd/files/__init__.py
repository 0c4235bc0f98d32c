"""Tests of `envd/files`."""
