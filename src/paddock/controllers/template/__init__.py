"""Reports the revision of templates in their status."""
