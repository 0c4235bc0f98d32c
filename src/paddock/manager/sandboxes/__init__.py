"""Use cases of sandboxes: lifecycle, snapshots, forks, batches, lists."""
