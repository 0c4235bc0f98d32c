"""Images of registries: parse references, authenticate, download, verify, unpack.

    puller = Puller(store, downloads, RegistrySettings(...))
    image = await puller.pull("python:3.12", team="default")

The protocol is that of the OCI distribution specification, with the additions of Docker. Nothing
that a registry sends is trusted: manifests and layers are verified by digest, sizes are bounded,
and addresses are checked before a connection is made.
"""
