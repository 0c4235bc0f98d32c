"""Pauses idle sandboxes whose spec has `idlePause`."""
