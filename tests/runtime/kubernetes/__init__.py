"""Tests of `runtime/kubernetes`."""
