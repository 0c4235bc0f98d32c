"""Reconciles batches: which sandbox serves which shard, and the tasks in them.

`allocation` and `shards` decide (pure), `allocation/allocator` writes allocations per pool,
`controller` reconciles each batch, `tasks` runs and watches the tasks of the shards.
"""
