"""Dockerfiles: parsed into stages, translated into the steps of template builds. No I/O."""
