"""Tests of `manager/environments`."""
