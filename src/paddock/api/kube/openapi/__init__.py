"""OpenAPI documents of the declarative API."""
