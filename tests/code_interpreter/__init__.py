"""Tests of the code interpreter, without sandboxes: its kernels are local processes."""
