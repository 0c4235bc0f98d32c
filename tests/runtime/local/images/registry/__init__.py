"""Tests of pulls from registries."""
