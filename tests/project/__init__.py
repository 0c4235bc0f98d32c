"""Tests of `project`."""
