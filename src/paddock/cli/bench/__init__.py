"""`paddock bench`: run the benchmarks."""
