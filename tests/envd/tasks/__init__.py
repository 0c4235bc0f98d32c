"""Tests of `envd/tasks`."""
