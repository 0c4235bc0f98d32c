"""Reconciles pools of warm sandboxes: `plan` decides how many, `controller` acts."""
