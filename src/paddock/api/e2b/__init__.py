"""E2B's control API, so that its unmodified SDKs and CLI work against Paddock."""
