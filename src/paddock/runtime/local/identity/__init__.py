"""What identifies a sandbox inside: identity files, and the hooks that run in a new clone."""
