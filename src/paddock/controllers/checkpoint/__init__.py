"""Reconciles checkpoints: `plan` decides, `controller` acts."""
