"""Reconciles environments: `render` and `autoscale` decide, `controller` acts."""
