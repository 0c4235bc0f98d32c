"""TLS that the control plane serves itself."""
