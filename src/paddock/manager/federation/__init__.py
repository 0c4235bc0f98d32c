"""Claims that other clusters serve."""
