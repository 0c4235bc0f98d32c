"""What every layer may use and none of which knows the domain.

Errors, clock, waits between attempts, ids, tasks, logs, settings, metrics.
"""
