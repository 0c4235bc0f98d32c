"""Tests of `app/roles`."""
