"""Tasks of batches: which shard runs what, and how results are collected."""
