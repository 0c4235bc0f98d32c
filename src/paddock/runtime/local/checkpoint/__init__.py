"""Checkpoints: the processes and memory of a sandbox stored as files, and brought back.

What a sandbox must be like to be stored (the launcher's side of the bargain; each line was tried):

- All its namespaces (user, pid, mount, net, ipc, uts, cgroup) come from one `clone3`, so that its
  own user namespace owns them.
- **No fixed uid range is needed.** The map in the stored image is rewritten on restore, so every
  sandbox and every clone has a range of its own. For that the files must not know the range: not
  only the image's layers but also the box from `storage` (the directory with `upper/` and `work/`)
  is mounted idmapped with the sandbox's range before the overlay is mounted over them, so that
  root inside is 0 on disk, `user` is 1000 on disk, whatever the range.
  Overlayfs acts with the ids of whoever mounts it. Host root is not mapped in such an upper, and
  the kernel then mounts the overlay silently READ-ONLY (`work` cannot be made). So the mounting
  thread does `prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)`, `setfsgid(range)`,
  `setfsuid(range)`, mounts the overlay, and sets both back to 0.
- Init is its own session leader; it holds no file from a mount outside (open /dev/null anew
  inside); pipes and sockets have both ends inside the tree; no parent-death signal.
- Bind mounts from outside are fine: nodes of the host's devtmpfs are recognised, every other one
  must be named when dumping and given again when restoring (`externals`).
- Every tmpfs inside is packed by `tar` on dump and unpacked on restore, some 10 ms each: keep to
  /dev/shm where you can, and put /dev in the overlay (the nodes are bind mounts anyway).
- Restored processes are born into a fresh network namespace with nothing but `lo`; the `wire`
  callback gives it links and addresses before any process goes on. Sockets come back bound as they
  were even where their address is missing.

    program, reason = find_criu()                       # by a real dump; None and why
    checkpointer = Checkpointer(program)                # keep it: it caches namespaces
    checkpointer.dump(Dump(pid=init, images=storage.box_memory(uid), leave_running=False,
                           group=cgroups.unified(group)))                           # hibernate
    checkpointer.dump(Dump(pid=init, images=storage.checkpoint_memory(cp), leave_running=True,
                           group=..., at_rest=lambda: storage.snapshot(uid, cp)))   # snapshot

    userns = checkpointer.id_namespace(base)            # for the launcher's `MakeRoot`
    ground = lambda: Ground(root=..., binds=...)        # detached mounts from MakeRoot
    restored = checkpointer.restore(Restore(images=..., id_base=base, ground=ground, groups=(
        cgroups.unified(group), *cgroups.joins(group)), keep_connections=<same sandbox>, wire=...))

A dump needs no freeze of one's own: CRIU stops everything by the control group, `at_rest` runs
while nothing moves and memory is already stored, and a sandbox that was frozen stays so. To make
that moment short, `storage.flush(uid)` first. Nobody may hold init's channels for longer than it
takes to notice: copies of descriptors outside do not disturb CRIU.

`criu` talks to CRIU, `place` prepares a restore, `manifest` says what is stored and whether it is
whole, `mounts` knows which mounts come from outside, `probe` finds a CRIU that works.
"""

from paddock.runtime.local.checkpoint.checkpointer import (
    Checkpointer,
    Dump,
    Ground,
    Restore,
    Restored,
)
from paddock.runtime.local.checkpoint.manifest import StoredMemory, is_whole
from paddock.runtime.local.checkpoint.probe import find_criu, probe

__all__ = [
    "Checkpointer",
    "Dump",
    "Ground",
    "Restore",
    "Restored",
    "StoredMemory",
    "find_criu",
    "is_whole",
    "probe",
]
