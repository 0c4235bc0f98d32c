"""Batches and tasks."""
