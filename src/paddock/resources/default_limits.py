"""Limits of a sandbox whose template has none: what the node enforces is what quotas count."""

DEFAULT_CPU_MILLIS = 2000
DEFAULT_MEMORY_BYTES = 2 << 30
DEFAULT_DISK_BYTES = 10 << 30
DEFAULT_PIDS = 4096
DEFAULT_BANDWIDTH = 500_000_000
"""Bits per second of network traffic, in each direction: see docs/decisions/0107."""
DEFAULT_IO_BANDWIDTH = 400 << 20
"""Bytes per second of disk I/O, in each direction."""
DEFAULT_IO_IOPS = 20_000
