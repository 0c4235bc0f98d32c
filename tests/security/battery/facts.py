"""Files and directories about the machine that a sandbox must find empty."""

FILES = (
    *("buddyinfo", "cgroups", "cmdline", "config.gz", "diskstats", "interrupts", "iomem"),
    *("kallsyms", "keys", "modules", "partitions", "schedstat", "sched_debug", "softirqs"),
    *("swaps", "timer_list", "vmallocinfo", "slabinfo", "zoneinfo", "kcore", "pressure/cpu"),
    *("pressure/io", "pressure/memory", "sys/fs/file-nr", "sys/fs/inode-nr", "sys/fs/aio-nr"),
    *("sys/fs/dentry-state", "sys/kernel/core_pattern", "sys/kernel/pty/nr"),
)
"""Below /proc."""

TREES = (
    *("/proc/bus", "/proc/fs", "/proc/irq", "/sys/fs/btrfs", "/sys/fs/ext4", "/sys/fs/xfs"),
    *("/sys/block", "/sys/kernel/boot_params", "/sys/kernel/slab", "/sys/kernel/irq"),
    *("/sys/kernel/debug", "/sys/firmware", "/sys/module", "/sys/bus/pci"),
    *("/sys/devices/virtual/dmi", "/sys/devices/system/node", "/sys/kernel/tracing"),
    "/sys/class/block/*/",
)
