"""Files of a sandbox: routes, uploads, downloads, entries, watches."""
