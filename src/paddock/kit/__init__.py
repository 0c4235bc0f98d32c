"""What every layer may use and none of which knows the domain.

Errors, clock, ids, tasks, logs, settings, metrics.
"""
