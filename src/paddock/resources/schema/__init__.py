"""Validation rules, OpenAPI schemas and CRDs of the kinds."""
