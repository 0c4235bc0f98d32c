"""Reconciles template builds: `plan` decides, `controller` acts, `run` performs one build."""
