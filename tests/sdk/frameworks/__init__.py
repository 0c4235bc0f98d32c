"""Tests of the examples for frameworks."""
