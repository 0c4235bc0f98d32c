"""Selects the pool of each batch and divides its sandboxes among batches."""
