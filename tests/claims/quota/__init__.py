"""Tests of `claims/quota`."""
