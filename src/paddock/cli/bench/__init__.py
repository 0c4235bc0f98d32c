"""`paddock bench`: the project's benchmarks."""
