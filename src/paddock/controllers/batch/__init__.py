"""Batches: which sandboxes serve which shards, and the tasks they run.

`allocation` and `shards` decide (pure), `allocator` writes allocations per pool, `controller`
keeps each batch, `tasks` and `follower` look after what runs in the shards.
"""
