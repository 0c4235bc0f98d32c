"""Helpers that every layer may use; none of them depends on the domain.

Errors, clock, backoff, ids, tasks, logs, metrics, pid files, bearer tokens, HTTP client.
"""
