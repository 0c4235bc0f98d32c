"""Tests of `manager/federation`."""
