"""The sidecar container of a sandbox's pod: envd, joined to the main container."""
