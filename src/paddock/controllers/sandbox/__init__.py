"""Reconciles sandboxes: `lifecycle` holds the transitions, `plan` decides, `controller` acts."""
