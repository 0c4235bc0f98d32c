"""Logging in to registries of AWS (ECR) with access keys."""
