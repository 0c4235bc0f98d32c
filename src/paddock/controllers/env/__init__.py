"""Environments: `render` and `autoscale` decide, `controller` acts and feeds the router."""
