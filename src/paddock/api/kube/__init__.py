"""The declarative API: resources over HTTP with Kubernetes' conventions, so that `kubectl` works.

Depends on the Store port only. The entry point is `app.create_app`.
"""
