"""Limits of a sandbox whose template has none: what the node enforces is what quotas count."""

DEFAULT_CPU_MILLIS = 2000
DEFAULT_MEMORY_BYTES = 2 << 30
DEFAULT_DISK_BYTES = 10 << 30
DEFAULT_PIDS = 4096
