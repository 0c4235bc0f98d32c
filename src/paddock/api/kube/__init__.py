"""The resources themselves over HTTP, with Kubernetes' conventions, so that `kubectl` works.

Works on the Store port alone. `app.create_app` is the way in.
"""
