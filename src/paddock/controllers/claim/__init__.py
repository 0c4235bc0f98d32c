"""Declarative claims: `plan` decides, `controller` acts."""
