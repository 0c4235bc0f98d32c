"""Tests of `envd/zygote`."""
