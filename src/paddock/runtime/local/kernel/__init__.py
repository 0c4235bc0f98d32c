"""Interfaces of the kernel: cgroups, system calls, pidfds, sysctls, process limits."""
