"""Checkpoints: store the processes and memory of a sandbox as files, and restore them.

Requirements on a sandbox, which the launcher has to meet (each was tested):

- All its namespaces (user, pid, mount, net, ipc, uts, cgroup) come from one `clone3`, so that its
  own user namespace owns them.
- **No fixed uid range is needed.** The map in the stored image is rewritten on restore, so every
  sandbox and every clone has its own range. For that, files on disk must not depend on the range:
  not only the image's layers but also the disk from `storage` (the directory with `upper/` and
  `work/`) is mounted idmapped with the sandbox's range before the overlay is mounted over them, so
  that root inside is 0 on disk and `user` is 1000 on disk, whatever the range.
  Overlayfs uses the ids of the mounting thread. Host root is not mapped in such an upper, and the
  kernel then silently mounts the overlay READ-ONLY (`work` cannot be created). So the mounting
  thread calls `prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)`, `setfsgid(range)` and
  `setfsuid(range)`, mounts the overlay, and sets both back to 0.
- Init is its own session leader; it has no open file from an outside mount (reopen /dev/null
  inside); pipes and sockets have both ends inside the tree; no parent-death signal.
- Bind mounts from outside are allowed: device nodes of the host's devtmpfs are recognised, every
  other bind mount must be passed again on restore (`externals`).
- Every tmpfs inside is packed by `tar` on dump and unpacked on restore, about 10 ms each: use only
  /dev/shm if possible, and put /dev in the overlay (the nodes are bind mounts anyway).
- Restored processes start in a new network namespace that has only `lo`; the `connect_network`
  callback adds links and addresses before any process continues. Sockets are restored as bound,
  even if their address is missing.

    program, reason = find_criu()                       # tries a dump; (None, reason) if it fails
    checkpointer = Checkpointer(program)                # reuse it: it caches namespaces
    checkpointer.dump(Dump(pid=init, images=storage.sandbox_memory(uid), leave_running=False,
                           group=cgroups.unified(group)))                           # hibernate
    checkpointer.dump(Dump(pid=init, images=storage.checkpoint_memory(cp), leave_running=True,
                           group=..., while_frozen=lambda: storage.snapshot(uid, cp)))   # snapshot

    userns = checkpointer.id_namespace(base)            # for the launcher's `MakeRoot`
    mount_root = lambda memory: RestoreMounts(root=..., binds=...)   # detached mounts
    restored = checkpointer.restore(Restore(
        images=..., id_base=base, mount_root=mount_root,
        groups=(cgroups.unified(group), *cgroups.joins(group)),
        keep_connections=<same sandbox>, connect_network=...))

The caller need not freeze the sandbox for a dump: CRIU freezes it by the control group. The
`while_frozen` callback runs while it is frozen and memory is already stored. A sandbox that was
frozen before stays frozen. Call `storage.flush(uid)` first to keep that time short. Copies of
init's descriptors outside the sandbox do not disturb CRIU.

`criu` drives CRIU, `restore_dir` prepares a restore, `manifest` describes stored images and detects
incomplete ones, `mounts` finds the mounts from outside, `probe` finds a CRIU that works,
`unstorable` finds what no CRIU can store.
"""

from paddock.runtime.local.checkpoint.checkpointer import (
    Checkpointer,
    Dump,
    Restore,
    Restored,
    RestoreMounts,
)
from paddock.runtime.local.checkpoint.manifest import StoredMemory, is_complete
from paddock.runtime.local.checkpoint.probe import find_criu, probe
from paddock.runtime.local.checkpoint.unstorable import require_untraced

__all__ = [
    "Checkpointer",
    "Dump",
    "Restore",
    "RestoreMounts",
    "Restored",
    "StoredMemory",
    "find_criu",
    "is_complete",
    "probe",
    "require_untraced",
]
