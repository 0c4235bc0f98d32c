"""Kernel interfaces: cgroups, system calls, pidfds, sysctls, process limits."""
